"""The search: its points are what ``simulate`` says, it finds what trying everything finds."""

from __future__ import annotations

import json
from itertools import product

import pytest

from megatron_ext import cli
from megatron_ext.plan.balance import balanced
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import Split, even_split, read_layout, split_of
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.point import evaluate
from megatron_ext.plan.search import search
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.times import costs_in_us, stage_times
from megatron_ext.schedule import ScheduleSpec
from megatron_ext.schedule.generators import NAMES
from megatron_ext.schedule.placement import Placement
from tests.support.grids import sampled

from .every import candidates

SMALL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --bf16 --swiglu "
    "--vocab-size 64000 --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --use-distributed-optimizer --pipeline-model-parallel-size 4 "
    "--world-size 4 --global-batch-size 8"
)
GIB = 2**30


def space(line=SMALL, **changes):
    job = job_of(read(line.split())[0])
    options = {"gpu": gpu_of("A100"), "micro_batch_sizes": (1, 2)}
    return SearchSpace(job, pp=job.pipeline_model_parallel_size, **{**options, **changes})


def everything(where):
    """All points without offload, of all shapes, jobs and splits."""
    return [evaluate(one.spec, one.workload) for one in candidates(where)]


@pytest.fixture(scope="module")
def small():
    """The search of the small model with all schedules."""
    return search([space()], 11 * GIB)


@pytest.fixture(scope="module")
def found():
    """One point of each schedule, with offload and without."""
    moved = space(offload=("auto",), always_offload=True, schedules=("v-half", "po"))
    every = [*candidates(space()), *candidates(moved)]
    chosen = {(one.spec.name, one.row.offload): one for one in every}.values()
    return [evaluate(one.spec, one.workload) for one in chosen]


def test_every_point_is_what_simulate_says(found, tmp_path, capsys):
    path = tmp_path / "stages.json"
    kinds = {(p.spec.name, p.offload is None) for p in found}
    assert len(kinds) > 6 and {True, False} <= {alone for _, alone in kinds}
    for point in found:
        path.write_text(json.dumps(point.stage_cost()))
        assert cli.main(["simulate", "--json", *point.simulate_arguments(str(path))]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["makespan"] == point.makespan_us
        assert said["bubble"] == float(point.bubble)
        assert said["peak_activation"] == [float(x) for x in point.peak_activation]
        if point.offload:
            assert said["peak_host_activation"] == [float(x) for x in point.peak_host_activation]


ALL_OF = ("1f1b,v-half,v-zb", "1f1b,zb-h1,interleaved-zb,v-half,v-zb")


@pytest.fixture(scope="module", params=sampled(ALL_OF, ALL_OF[:1]))
def tried(request):
    """A space, and all its points, nothing pruned."""
    where = space(offload=(), schedules=tuple(request.param.split(",")))
    return where, everything(where)


@pytest.mark.parametrize("budget", [10, 12, 16, 40])
def test_enumeration_loses_little(tried, budget):
    """The best of all points without offload is found, or one about as fast."""
    where, all_points = tried
    every = [p for p in all_points if p.worst.total <= budget * GIB]
    result = search([where], budget * GIB)
    if not every:
        assert result.best is None
        return
    assert result.best is not None
    assert result.best.iteration_us <= min(p.iteration_us for p in every) * 1.005
    assert len(result.points) < len(all_points)


def test_a_budget_that_nothing_fits_names_the_least():
    where = space(offload=(), schedules=("1f1b", "v-min"), micro_batch_sizes=(1,))
    result = search([where], 2 * GIB)
    assert result.best is None and not result.front
    assert result.smallest.worst.total == min(p.worst.total for p in everything(where))
    again = search([where], result.smallest.worst.total)
    assert again.best is not None


VEES = ("v-min,v-half,v-zb", "v-min,v-half,v-cap,v-zb")


ANY_OF = ("v-half,v-cap,po", ",".join(NAMES))


@pytest.mark.parametrize("names", sampled(ANY_OF, ANY_OF[:1]))
def test_the_same_answer_every_time(names):
    where = space(schedules=tuple(names.split(",")))
    first, second = (search([where], 11 * GIB) for _ in range(2))
    assert [p.key() for p in first.points] == [p.key() for p in second.points]


@pytest.mark.parametrize(("pp", "v", "vee"), [(4, 1, False), (4, 2, False), (4, 2, True)])
def test_no_split_is_better_balanced(pp, v, vee):
    """Against all splits of few layers."""
    placement = Placement.vee(pp) if vee else Placement.loop(pp, v)
    stages = placement.num_stages
    first, last = 0.3, 2.4
    for layers in range(stages, stages + 3):
        split = balanced(placement, layers, [1.0] * pp, first, last)
        assert split is not None and sum(split.counts) == layers

        def heaviest(counts):
            loads = [sum(counts[s] for s in row) for row in placement.stages]
            loads[placement.rank_of(0)] += first
            loads[placement.rank_of(stages - 1)] += last
            return max(loads)

        low = [0] + [1] * (stages - 2) + [0]
        extra = layers - sum(low)
        options = product(range(pp), repeat=extra)
        best = min(
            heaviest([n + adds.count(placement.rank_of(s)) * (placement.chunk_of(s) == 0)
                      for s, n in enumerate(low)])
            for adds in options
        )  # fmt: skip
        assert heaviest(split.counts) == pytest.approx(best)


def test_balance_makes_a_v_with_a_large_vocabulary_faster_and_smaller():
    line = SMALL.replace("64000", "256000")
    with_, without = (
        search([space(line, balance=b, offload=(), schedules=("v-half",))], 40 * GIB).best
        for b in (True, False)
    )
    assert with_ is not None and without is not None
    assert with_.makespan_us < without.makespan_us * 0.95
    assert without.workload.split.even and not with_.workload.split.even
    layout = next(f for f in with_.flags() if "layout" in f).split()[1].strip("'")
    assert read_layout(layout, 16) == with_.workload.split


def test_layers_that_do_not_divide_get_a_layout():
    line = SMALL.replace("--num-layers 16", "--num-layers 15")
    names = ("1f1b", "interleaved-zb", "v-half")
    best = search([space(line, schedules=names)], 40 * GIB).best
    assert best is not None and sum(best.workload.split.counts) == 15
    with pytest.raises(PlanError, match="none of v-half is possible with 3 layers"):
        search([space(SMALL.replace("layers 16", "layers 3"), schedules=("v-half",))], GIB)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Et|t|tL", (1, 1, 1)),
        ("Et*3|(t|)*2tt,L", (3, 1, 1, 2)),
        ("E|(t*2|)*2L", (0, 2, 2, 0)),
        ("E|t|tt|L", (0, 1, 2, 0)),
        ("E|(t|)*3L", (0, 1, 1, 1, 0)),
    ],
)
def test_layouts_are_read(text, counts):
    assert read_layout(text, sum(counts)) == Split(counts)
    assert read_layout(Split(counts).text(), sum(counts)).counts == counts


@pytest.mark.parametrize("text", ["t|tL", "Et|Em|L", "Et|t", "E|tL|t", "Ett|tL"])
def test_layouts_that_are_not_the_models(text):
    with pytest.raises(PlanError, match="layout"):
        read_layout(text, 2)


def test_a_given_layout_stays():
    job = job_of(
        read([*SMALL.split(), "--pipeline-model-parallel-layout", "Etttt|t*4|t*4|t*4L"])[0]
    )
    assert split_of(job, 8) is None and split_of(job, 4) == even_split(16, 4).__class__((4,) * 4)
    where = SearchSpace(job, gpu_of("A100"), 4)
    result = search([where], 40 * GIB)
    assert {p.spec.chunks for p in result.points} == {1}


def test_times_follow_the_flops():
    """PipeOffload's F+B+W of a layer, 12bsh(6h+s) FLOPs uncausal, at large sizes.

    What lies between the products is not in that: 5 bytes an element and 10 to 20 passes.
    """
    line = "--num-layers 10 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --bf16 "
    line += "--hidden-dropout 0 --position-embedding-type rope"
    job, gpu = job_of(read(line.split())[0]), gpu_of("A100")
    f, b, w = stage_times(job, Split((0, 10, 0)), gpu)[1]
    b_s, s, h = job.tokens, 4096, 8192
    causal = 2 * b_s * s * h  # of one pass: half of the 4bssh
    dense = 24 * b_s * h * h
    products = 10 * dense / (gpu.flops * gpu.efficiency)
    attention = 10 * causal / (gpu.flops * gpu.attention)
    between = 10 * 2 * b_s * h * 22 / gpu.bandwidth
    assert f == pytest.approx(products + attention + between, rel=0.05)
    assert b == pytest.approx(products + 2.5 * attention + 1.3 * between, rel=0.05)
    assert w == pytest.approx(products, rel=0.05)
    costs = costs_in_us([(1e-3, 2e-3, 4e-7)] * 2, 1.6e-5)
    assert costs.stages is not None and [int(x) for x in costs.stages[0]] == [1000, 2000, 1]


def test_the_answer_is_an_order_of_training_whatever_the_work(small):
    result = search([space()], 11 * GIB, share=1e-6)
    assert result.best is not None
    assert result.best.spec.effort == ScheduleSpec("1f1b", 2, 1).effort
    assert small.best.iteration_us <= result.best.iteration_us


# PipeOffload's models in small: long sequences, and an output layer worth several layers.
VOCABULARY = (
    "--num-layers 14 --hidden-size 8192 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 16384 --max-position-embeddings 16384 --padded-vocab-size "
    "50257 --untie-embeddings-and-output-weights --bf16 --hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl local --attention-backend flash --micro-batch-size 1 "
    "--pipeline-model-parallel-size 8 --world-size 8 --global-batch-size 16"
)


def large(offload, always=True, **changes):
    options = {"schedules": ("po",), "micro_batch_sizes": (1,), "cheap_recompute": (True,)}
    options = {**options, "chunks": (2,), "always_offload": always, **changes}
    return space(VOCABULARY, offload=offload, **options)


@pytest.fixture(scope="module")
def full():
    return search([large(("full",))], 74 * GIB)


def test_offload_that_is_asked_for_is_there(full):
    assert full.best is not None and {p.offload for p in full.points} == {"full"}
    assert full.front and full.best.note.split()[0].isdigit()
    nothing = search([large(("full",))], 10 * GIB)
    assert nothing.best is None and nothing.smallest.offload == "full"
    slow = large(("full",), gpu=gpu_of("A100").with_(to_host=1e8, to_device=1e8))
    result = search([slow], 200 * GIB)
    assert result.best.offload == "full" and "stay" in result.best.note


def test_flags_and_simulate_have_every_stages_time(full, tmp_path, capsys):
    best = full.best
    assert "--pp-offload full" in best.flags()
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(best.stage_cost()))
    assert cli.main(["simulate", "--json", *best.simulate_arguments(str(path))]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["makespan"] == best.makespan_us
    assert said["peak_host_activation"] == [float(x) for x in best.peak_host_activation]
