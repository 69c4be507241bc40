"""The model of times beside published passes, and the files of devices."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from megatron_ext.commands.plan_calibration import calibration
from megatron_ext.plan.calibration import (
    LEAST,
    compare,
    devices,
    expected_error,
    published,
    summary,
)
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import FORMAT, GPUS, gpu_from_json, gpu_of
from megatron_ext.plan.layout import Split
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.times import KERNEL_S, stage_times
from megatron_ext.plan.transfer import layer_transfer

FITTED = ("efficiency", "ramp", "stream", "attention", "collective", "collective_s")


@pytest.fixture(scope="module")
def rows():
    return compare(gpu_of("A100"), published("A100")["figures"])


class TestErrors:
    def test_of_fitted_and_of_held_out_figures(self, rows):
        """As docs/concepts/pass-times.md has them. Six numbers are fitted to 15."""
        fitted = summary([row for row in rows if row.fitted])
        held = summary([row for row in rows if not row.fitted])
        assert (fitted.number, held.number) == (15, 61)
        assert abs(fitted.mean) < 0.01 and abs(held.mean) < 0.02
        assert fitted.rms < 0.07 and held.rms < 0.08
        assert abs(fitted.worst) < 0.13 and abs(held.worst) < 0.17

    @pytest.mark.parametrize(("device", "names"), [("A100", FITTED), ("H200", FITTED[:4])])
    def test_the_numbers_are_the_best_of_their_neighbours(self, device, names):
        """So nobody changed one by hand: none 5 % beside has a smaller error on fitted figures."""
        figures = [each for each in published(device)["figures"] if each["fitted"]]
        gpu = gpu_of(device)

        def error(one):
            return summary(compare(one, figures)).rms

        best = error(gpu)
        for name in names:
            for factor in (0.95, 1.05):
                other = replace(gpu, **{name: getattr(gpu, name) * factor})
                assert error(other) > best - 2e-4, (name, factor)

    def test_of_the_h200(self):
        """Four numbers are fitted to every second shape; with the A100's shares, errors of the
        shapes that are held out are twice as large."""
        figures = published("H200")["figures"]
        shapes = list(dict.fromkeys(each["flags"] for each in figures))
        assert all(each["fitted"] == (shapes.index(each["flags"]) % 2 == 0) for each in figures)
        gpu = gpu_of("H200")
        fitted, held = (
            summary([row for row in compare(gpu, figures) if row.fitted == which])
            for which in (True, False)
        )
        assert (fitted.number, held.number) == (35, 32)
        assert abs(fitted.mean) < 0.01 and abs(held.mean) < 0.02
        assert fitted.rms < 0.07 and held.rms < 0.075
        assert abs(fitted.worst) < 0.15 and abs(held.worst) < 0.175
        shares = {name: getattr(gpu_of("A100"), name) for name in FITTED[1:4]}
        before = replace(gpu, efficiency=0.734, **shares)
        others = summary([row for row in compare(before, figures) if not row.fitted])
        assert others.rms > 1.9 * held.rms

    def test_k_of_pipeoffload(self, rows):
        """Figure 1, left, with no number fitted to it: +12 % in the mean before."""
        found = [row for row in rows if row.quantity == "k"]
        assert len(found) == 24
        assert max(abs(row.ours / row.published - 1) for row in found) < 0.065
        assert abs(summary(found).mean) < 0.03

    def test_tensor_parallelism_at_large_hidden_sizes(self, rows):
        """Figure 12a, h = 10240: at 8 ranks a pass had .61-.62 before."""
        found = {row.what: row for row in rows if row.source.endswith("12a")}
        assert found["98.5B, t 8, b 1"].ours == pytest.approx(0.45, rel=0.02)
        assert found["98.5B, t 8, b 8"].ours == pytest.approx(0.57, rel=0.02)
        assert all(abs(row.error) < 0.04 for row in found.values())

    def test_w_is_shorter_than_f_and_b(self, rows):
        """Zero Bubble's W/F is .50 to .74; ours was .85 to .95."""
        found = {(row.what, row.quantity): row for row in rows if "table 9" in row.source}
        for what in {what for what, _ in found}:
            f, b, w = (found[what, quantity] for quantity in "FBW")
            assert w.ours < 0.8 * f.ours and w.ours < b.ours
            assert w.ours / f.ours == pytest.approx(w.published / f.published, rel=0.25)

    def test_errors_are_of_times(self):
        figures = published("A100")["figures"]
        slow = replace(gpu_of("A100"), flops=2.9e14, bandwidth=1.9e12)
        for fast, late in zip(compare(gpu_of("A100"), figures), compare(slow, figures)):
            if fast.quantity != "MFU":  # a share of less is about as large
                assert late.error > fast.error


class TestExpectedError:
    """Of all passes together, from figures that were held out."""

    JOB = "--num-layers 8 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --bf16 "

    def error(self, gpu, more=""):
        return expected_error(gpu, job_of(read((self.JOB + more).split())[0]))

    def test_of_a_device_with_passes_of_its_own(self):
        gpu = gpu_of("H200")
        errors = []
        for each in published("H200")["figures"]:
            if not each["fitted"]:
                rows = compare(gpu, [each])
                ours, theirs = (sum(getattr(r, n) for r in rows) for n in ("ours", "published"))
                errors.append(math.log(ours / theirs))
        assert len(errors) == 11 >= LEAST
        rms = math.sqrt(sum(x * x for x in errors) / len(errors))
        assert self.error(gpu) == pytest.approx(math.expm1(rms))
        assert 0.03 < self.error(gpu) < 0.06

    def test_of_all_devices_where_it_has_none(self):
        """The H100 has one, which counts among all; other rates are another device."""
        every = self.error(gpu_of("B200"))
        assert self.error(gpu_of("H100")) == every > 0.1
        assert self.error(replace(gpu_of("H200"), efficiency=0.5)) == every
        assert self.error(replace(gpu_of("H200"), to_host=1e9)) == self.error(gpu_of("H200"))

    def test_of_tensor_parallel_layers(self):
        """Only the A100 has those."""
        parallel = "--tensor-model-parallel-size 8"
        assert self.error(gpu_of("A100"), parallel) == self.error(gpu_of("H200"), parallel)
        assert self.error(gpu_of("A100"), parallel) > self.error(gpu_of("A100")) > 0.05


class TestFiles:
    def test_every_number_of_every_device_has_a_source(self):
        names = {"flops", "memory_bytes", "bandwidth", "to_host", "to_device", "peer", "network"}
        for gpu in GPUS.values():
            sources = dict(gpu.sources)
            assert sources.keys() - {"devices_per_node"} == names | {"units", *FITTED}
            assert all(text.endswith(")") for text in sources.values())
            assert len(gpu.assumptions()) < len(sources)

    def test_what_is_fitted(self):
        assert devices() == ["A100", "H100", "H200"]
        for name in ("H100", "B200", "MI300X"):
            assert "scaled from the A100" in dict(gpu_of(name).sources)["efficiency"]
            assert gpu_of(name).ramp == gpu_of("A100").ramp
        sources = dict(gpu_of("H200").sources)
        assert all("on H200" in sources[name] for name in FITTED[:4])
        assert gpu_of("H100").attention == gpu_of("H200").attention
        assert gpu_of("B200").attention == gpu_of("A100").attention

    def test_of_the_user(self, tmp_path):
        path = tmp_path / "mine.json"
        numbers = {"efficiency": 0.5, "ramp": {"value": 0, "sure": "measured", "source": "me"}}
        path.write_text(json.dumps(_device(numbers, like="H100")))
        gpu = gpu_of(str(path))
        assert (gpu.name, gpu.efficiency, gpu.ramp, gpu.flops) == ("mine", 0.5, 0, 989e12)
        assert dict(gpu.sources)["ramp"] == "me (measured)"
        assert not gpu.has_rates_of_the_table
        assert replace(gpu_of("H100"), to_host=1e9).has_rates_of_the_table
        assert not replace(gpu_of("H100"), collective=0.7).has_rates_of_the_table

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ([], '"format" must be'),
            ({"format": "another"}, '"format" must be'),
            ({"format": FORMAT, "name": "x"}, '"name" and an object "numbers"'),
            ({"format": FORMAT, "name": "x", "numbers": {"speed": 1}}, "unknown number 'speed'"),
            ({"format": FORMAT, "name": "x", "numbers": {"flops": "1"}}, "flops must be a number"),
            ({"format": FORMAT, "name": "x", "numbers": {"flops": 1e999}}, "must be a number"),
            ({"format": FORMAT, "name": "x", "numbers": {"flops": 1e15}}, "it lacks memory_bytes"),
            ({"format": FORMAT, "name": "x", "like": "Z80", "numbers": {}}, "must be one of A100"),
            ({"format": FORMAT, "name": "x", "like": 1, "numbers": {}}, '"like" must be a name'),
            (
                {"format": FORMAT, "name": "x", "like": "H100", "numbers": {"stream": 1.5}},
                "stream must be a share",
            ),
        ],
    )
    def test_that_describe_none(self, data, words):
        with pytest.raises(PlanError, match=words):
            gpu_from_json(data, "file.json")

    def test_that_cannot_be_read(self, tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            gpu_of(str(tmp_path / "missing.json"))
        (tmp_path / "bad.json").write_text("{")
        with pytest.raises(PlanError, match=r"bad\.json"):
            gpu_of(str(tmp_path / "bad.json"))


def _device(numbers, **more):
    return {"format": FORMAT, "name": "mine", "numbers": numbers, **more}


MODEL = "--num-layers 1 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --bf16 "


def _times(flags, gpu="A100"):
    job = job_of(read((MODEL + flags).split())[0])
    return stage_times(job, Split((0, 1, 0)), gpu_of(gpu))[1]


class TestModel:
    def test_tensor_parallel_passes_pay_for_narrow_products_and_collectives(self):
        one = sum(_times(""))
        shares = []
        for t in (2, 4, 8):
            flags = f"--tensor-model-parallel-size {t} --sequence-parallel"
            shares.append(one / (t * sum(_times(flags))))
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0.9 and shares[-1] < 0.8

    def test_all_reduces_in_place_of_two_collectives(self):
        parallel = "--tensor-model-parallel-size 8"
        plain, sharded = _times(parallel), _times(parallel + " --sequence-parallel")
        # Norms of all tokens on every rank, against two starts of a collective more.
        assert plain[2] == sharded[2]
        assert plain[0] != sharded[0]

    def test_attention_is_slower_than_other_products(self):
        short = sum(_times(""))
        long = sum(_times("--seq-length 32768"))
        h, s = 8192, 32768
        causal = (24 * 3 * h + 3.5 * 2 * s) / (24 * 3 * h + 3.5 * 2 * 4096)
        assert long / (8 * short) > 1.1 * causal

    @pytest.mark.parametrize(("more", "bytes_"), [("", 10), (" --grad-reduce-in-bf16", 6)])
    def test_gradients_that_another_kernel_adds(self, more, bytes_):
        """Read in 16 bits; what they are added to is read and written."""
        flags, gpu = "--transformer-impl local --attention-backend flash" + more, gpu_of("A100")
        fused = _times(flags)
        apart = _times(flags + " --no-gradient-accumulation-fusion")
        assert apart[:2] == fused[:2]
        weights = 12 * 8192**2  # of four layers
        added = bytes_ * weights / (gpu.bandwidth * gpu.stream) + 4 * KERNEL_S
        assert apart[2] - fused[2] == pytest.approx(added)

    def test_cheap_recompute_of_local_layers_lowers_k(self):
        job = job_of(read((MODEL + "--transformer-impl local").split())[0])
        job = job.with_(flash_attention=True)
        k = [layer_transfer(job.with_(cheap_recompute=c), gpu_of("A100")).k for c in (0, 1)]
        assert k[1] < 0.7 * k[0]


def test_the_answer_names_what_is_not_known():
    data = calibration(gpu_of("MI300X"))
    assert data["comparisons"] == [] and len(data["numbers"]) == 14
    with pytest.raises(PlanError, match="no published pass times of MI300X"):
        published("MI300X")
