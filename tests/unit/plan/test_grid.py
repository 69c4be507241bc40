"""The search over parallel sizes: Megatron's rules, pruning, agreement with ``simulate``."""

from __future__ import annotations

import json

import pytest

from megatron_ext import cli
from megatron_ext.plan.collectives import Links, Overlap, overhead
from megatron_ext.plan.divisions import divisions
from megatron_ext.plan.flags import read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.grid import Grid, variants
from megatron_ext.plan.layout import Split
from megatron_ext.plan.memory import stage_bytes
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.parameters import Count
from megatron_ext.plan.search import Search
from megatron_ext.plan.space import SearchSpace

GIB = 2**30
SMALL = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --bf16 --swiglu "
    "--vocab-size 64000 --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --world-size 4 --global-batch-size 16"
)
WIDE = SMALL.replace("world-size 4", "world-size 8")
A100 = gpu_of("A100")


def given(line=SMALL):
    return read(line.split())[0]


def grid(line=SMALL, budget=30 * GIB, schedules=("1f1b", "zb-h1", "v-half"), **options):
    def space_of(job):
        return SearchSpace(
            job,
            A100,
            job.pipeline_model_parallel_size,
            schedules,
            (2,),
            (job.micro_batch_size,),
            (job.cheap_recompute,),
            offload=(),
        )

    return Grid(
        divisions(given(line)),
        space_of,
        lambda job: variants(job, (1, 2), (False,), full=True),
        Links(A100, 8),
        budget,
        **options,
    )


@pytest.fixture(scope="module")
def small():
    """A search, and all that it may choose from, nothing pruned."""
    search = grid()
    result = search.run()
    every = []
    for job in search.jobs:
        if job.pipeline_model_parallel_size == 1:
            continue
        for one in search.variants(job):
            try:
                found = Search(search.space_of(one), search.result.budget).run()
            except PlanError:
                continue
            every += [search.placed(point) for point in found.points]
    return result, [one for one in every if result.fits(one)]


def test_pruning_loses_nothing(small):
    result, every = small
    best = min(every, key=lambda one: one.iteration_us)
    assert result.best is not None and result.best.iteration_us == best.iteration_us
    assert result.pruned + result.skipped > 0 and len(result.points) < len(every)


def test_the_front_is_one(small):
    keys = [one.key() for one in small[0].front]
    assert keys == sorted(keys) and len(keys) > 1
    for key in keys:
        others = [other for other in keys if other != key]
        assert not any(all(a <= b for a, b in zip(other, key)) for other in others)


def test_points_are_what_simulate_says(small, tmp_path, capsys):
    path = tmp_path / "stages.json"
    assert len({one.job.pipeline_model_parallel_size for one in small[1]}) > 1
    for one in small[1]:
        point = one.point
        path.write_text(json.dumps(point.stage_cost()))
        assert cli.main(["simulate", "--json", *point.simulate_arguments(str(path))]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["makespan"] == point.makespan_us
        assert found["peak_activation"] == [float(x) for x in point.peak_activation]


def test_closed_forms_are_bounds(small):
    """No point of a case is faster or smaller than they allow."""
    search = grid()
    for one in small[1]:
        case = search.case(one.job)
        assert case.bound_us <= one.iteration_us
        assert case.states <= max(rank.states.total for rank in one.point.ranks) * 1.001


def test_the_same_answer_every_time(small):
    again = grid().run()
    assert [p.key() for p in again.points] == [p.key() for p in small[0].points]


def test_passes_are_limited():
    result = grid(effort=1e-4).run()
    assert result.points and result.skipped


def test_divisions_keep_megatrons_rules():
    line = SMALL + " --group-query-attention --num-query-groups 4 --num-experts 4"
    jobs = divisions(given(line.replace("world-size 4", "world-size 16")))
    assert len({(j.tensor_model_parallel_size, j.pipeline_model_parallel_size) for j in jobs}) > 8
    for job in jobs:
        tp, pp = job.tensor_model_parallel_size, job.pipeline_model_parallel_size
        cp, dp = job.context_parallel_size, job.data_parallel_size
        assert tp * pp * cp * dp == 16 and tp <= 8 and pp <= 8
        assert job.sequence_parallel == (tp > 1) and job.use_distributed_optimizer
        ep, etp = job.expert_model_parallel_size, job.expert_tensor_parallel_size
        assert (tp * cp * dp) % (ep * etp) == 0 and 4 % ep == 0
    assert len({j.expert_model_parallel_size for j in jobs}) > 2


def test_given_sizes_stay():
    for job in divisions(given(SMALL + " --tensor-model-parallel-size 2")):
        assert job.tensor_model_parallel_size == 2
    long = divisions(given(WIDE.replace("length 4096", "length 32768")))
    assert {job.context_parallel_size for job in long} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--tensor-model-parallel-size 3", "tensor-model-parallel-size 3"),
        (
            "--global-batch-size 7 --context-parallel-size 1 --pipeline-model-parallel-size 3",
            "no div",
        ),
        ("--pipeline-model-parallel-layout Et|tL", "give --pp too"),
    ],
)
def test_impossible_grids(change, words):
    with pytest.raises(PlanError, match=words):
        divisions(given(f"{SMALL} {change}"))


def test_a_ring_in_and_between_nodes():
    links = Links(A100, 8)
    size = 8 * 10**9
    inside, across = links.ring(size, 8, 1), links.ring(size, 8, 8)
    assert inside == pytest.approx(7e9 / A100.peer, rel=0.01)
    assert across == pytest.approx(7e9 / A100.network, rel=0.01)
    # Two members of each node use two adapters.
    assert links.ring(size, 8, 4) == pytest.approx(across / 2, rel=0.01)
    assert links.ring(size, 1, 1) == 0.0


def test_what_data_parallel_ranks_exchange():
    job = next(j for j in divisions(given(WIDE)) if j.data_parallel_size == 8)
    links = Links(A100, 8)
    gradients, parameters = links.data(job, Count(dense=10**9))
    assert gradients == pytest.approx(2 * parameters, rel=0.01), "fp32 gradients, bf16 parameters"
    whole = links.data(job.with_(use_distributed_optimizer=False), Count(dense=10**9))
    assert whole == (2 * gradients, 0.0), "all-reduced"
    rows = [stage_bytes(job, Split((8,)))]
    plain, hidden = (
        overhead(job, links, rows, [(10.0, 10.0)], [8], 4, overlap)
        for overlap in (Overlap(), Overlap(True, True))
    )
    assert plain.data > 0 and hidden.data == 0 and plain.optimizer == hidden.optimizer > 0


def test_attention_hides_context_parallel_exchange():
    jobs = divisions(given(SMALL.replace("length 4096", "length 16384")))
    job = next(j for j in jobs if j.context_parallel_size == 2)
    assert Links(A100, 8).context(job) == (0.0, 0.0)
    slow = Links(A100.with_(peer=1e9), 8).context(job)
    assert slow[0] > 0 and slow[1] > slow[0]
