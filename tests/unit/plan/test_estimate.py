"""What training makes its order for by default: the model's FLOPs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.plan.estimate import flop_costs
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import Gpu, gpu_of
from megatron_ext.plan.layout import even_split, split_of
from megatron_ext.plan.point import evaluate
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.times import stage_times
from megatron_ext.schedule import AUTO, GENERATORS, NAMES, Costs, ScheduleSpec, generate, select
from megatron_ext.schedule.effects import peak_sets
from megatron_ext.schedule.generators.cap import v_cap_limits
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.simulate import simulate
from tests.support.grids import sampled

SIZES = "--num-layers 32 --seq-length 4096 --micro-batch-size 1 --bf16"
DENSE = f"{SIZES} --hidden-size 2048 --num-attention-heads 16"
# Words, layers of several kinds, and little work in a layer beside a huge output layer.
MODELS = {
    "dense": f"{DENSE} --vocab-size 32000 --swiglu",
    "200k words": f"{SIZES} --hidden-size 512 --num-attention-heads 8 --vocab-size 200000",
    "mla and experts": f"{DENSE} --vocab-size 129280 --multi-latent-attention --num-experts 64 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 1408 --moe-layer-freq ([0]*3+[1]*29)",
}


def job(text):
    return job_of(read(shlex.split(text))[0])


def split(described, stages):
    return split_of(described, stages) or even_split(described.num_layers, stages)


class TestCosts:
    def test_flops_of_a_dense_model(self):
        """Of W: 24 s h^2 / 2 a token and layer without attention; of the output layer 2 h V in F,
        and twice that in B, which computes its weight gradient too."""
        line = DENSE.replace("--num-layers 32", "--num-layers 16") + " --vocab-size 65536"
        costs = flop_costs(job(line), even_split(16, 4))
        rows = costs.stages
        assert costs.hop == 0 and rows[0] == rows[1] == rows[2]
        h, v, s = 2048, 65536, 4096
        layer, output, scores = 24 * h * h, 2 * h * v, 2 * s * h  # causal: half of 4 s h
        forward, last = rows[0][0], rows[3]
        assert float(rows[0][2] / forward) == pytest.approx(layer / (layer + scores), rel=0.02)
        more = 2.5 * scores  # of flash attention's backward pass
        assert float(rows[0][1] / forward) == pytest.approx(
            (layer + more) / (layer + scores), rel=0.02
        )
        assert last[2] == rows[0][2]
        assert float(last[1] / rows[0][1]) == pytest.approx(
            1 + 2 * output / (4 * (layer + more)), rel=0.03
        )

    def test_flops_are_those_of_a_device_without_other_limits(self):
        """So every kind of layer has them."""
        endless = Gpu("", 1e3, 0, 1e40, 1e40, 1e40, 1e40, 1e40)
        for text in MODELS.values():
            one = job(text)
            times = stage_times(one, split(one, 8), endless)
            for row, seconds in zip(flop_costs(one, split(one, 8)).stages, times):
                for part, time in zip(row, seconds):
                    mean = sum(map(sum, times)) / 24
                    assert abs(part - max(1, round(64 * time / mean))) <= 1


def specs(pp, m, costs):
    """Every schedule, and some caps and groups of those that take them."""
    low, high = v_cap_limits(pp)
    for name in (*NAMES, AUTO):
        caps, groups = [None], [None]
        if name in (AUTO, "v-cap"):
            caps = [ShareCap(Fraction(sets, 2 * pp)) for sets in sorted({low, 3 * pp // 2, high})]
        elif GENERATORS[name].takes_group_size:
            groups = [-(-pp // 2) + 1, pp]
        chunks = 2 if name == AUTO else None
        for cap in caps:
            for group in groups:
                yield ScheduleSpec(name, pp, m, chunks, costs, cap, group)


SHAPES = [(model, pp, m) for model in MODELS for pp, m in ((2, 5), (4, 8), (4, 17), (8, 32))]
FEW = [("200k words", 2, 5), ("mla and experts", 2, 5)]


@pytest.mark.parametrize(("model", "pp", "m"), sampled(SHAPES, FEW))
def test_the_order_is_never_slower_than_one_for_equal_costs(model, pp, m):
    """Under the FLOPs, whatever the stages' costs; with the same peaks of memory at most."""
    one = job(MODELS[model])
    for spec in specs(pp, m, flop_costs(one, split(one, 2 * pp))):
        stages = 2 * pp if spec.name == AUTO else spec.placement.num_stages
        costs = flop_costs(one, split(one, stages))
        try:
            equal = select(replace(spec, costs=Costs())).schedule
        except ValueError:
            continue  # no schedule for these numbers, whatever the costs
        made = select(replace(spec, costs=costs)).schedule
        stages = equal.placement.num_stages
        real = flop_costs(one, split(one, stages))
        assert simulate(made).makespan <= simulate(equal, real).makespan, spec
        if spec.cap is not None:
            assert spec.cap.fits(made), spec
        elif spec.name != AUTO:
            assert max(peak_sets(made.ranks)) <= max(peak_sets(equal.ranks)), spec
        if spec.name in ("1f1b", "interleaved", "po", "dualpipev"):
            assert made.ranks == equal.ranks


def test_a_search_starts_from_the_order_for_equal_costs():
    """At costs that differ little that order is hard to beat."""
    one = job(MODELS["mla and experts"])
    costs = flop_costs(one, split(one, 16))
    searched = generate("v-cap", 8, 16, costs=costs, memory_cap=12, effort=0.01)
    equal = generate("v-cap", 8, 16, memory_cap=12)
    assert simulate(searched).makespan <= simulate(equal, costs).makespan


class TestFlagsOfPlan:
    """``plan`` prints a cost only where training does not come to it by itself."""

    def point(self, gpu):
        described = job(DENSE + " --vocab-size 65536 --global-batch-size 8")
        space = SearchSpace(described, gpu, 4)
        workload = space.workload(described, 8, even_split(32, 8))
        return evaluate(ScheduleSpec("v-half", 4, 8, 2, workload.costs), workload)

    def test_of_a_device_of_the_table(self):
        for gpu in (gpu_of("H100"), gpu_of("H100").with_(memory_bytes=2**30, to_host=1e9)):
            found = self.point(gpu)
            assert not any("--pp-cost" in words for words in found.flags())

    def test_of_rates_that_the_user_gives(self):
        found = self.point(gpu_of("H100").with_(efficiency=0.4))
        (words,) = [words for words in found.flags() if "--pp-cost" in words]
        assert words == found.workload.cost_flag and Costs.parse(words.split()[1])
