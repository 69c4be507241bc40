"""The files of devices, and what the model of times depends on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import FORMAT, gpu_from_json, gpu_of
from megatron_ext.plan.layout import Split
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.times import KERNEL_S, stage_times


class TestFiles:
    def test_of_the_user(self, tmp_path):
        path = tmp_path / "mine.json"
        numbers = {"efficiency": 0.5, "ramp": {"value": 0, "sure": "measured", "source": "me"}}
        path.write_text(json.dumps(_device(numbers, like="H100")))
        gpu = gpu_of(str(path))
        assert (gpu.name, gpu.efficiency, gpu.ramp, gpu.flops) == ("mine", 0.5, 0, 989e12)
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
