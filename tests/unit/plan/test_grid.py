"""The search over parallel sizes: Megatron's rules, closed forms, agreement with ``simulate``."""

from __future__ import annotations

import json

import pytest

from megatron_ext import cli
from megatron_ext.plan.alone import without_pipeline
from megatron_ext.plan.collectives import Links, Overlap, overhead
from megatron_ext.plan.divisions import divisions
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import Split
from megatron_ext.plan.memory import stage_bytes
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.parameters import Count
from megatron_ext.plan.point import evaluate
from megatron_ext.plan.search import search
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.stock import of_stock
from megatron_ext.plan.times import stage_times

from .every import candidates, every_row

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


def spaces(line=SMALL, schedules=("1f1b", "zb-h1", "v-half")):
    """Of every division."""
    return [
        SearchSpace(
            job, A100, job.pipeline_model_parallel_size, schedules, (2,), (1, 2), (False,),
            offload=(), full_recompute=True,
        )
        for job in divisions(given(line))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def small():
    """A search, and all pipelines that it may choose from, nothing pruned."""
    result = search(spaces(), 30 * GIB, alone=False)
    every = [
        (one, evaluate(one.spec, one.workload))
        for where in spaces()
        if where.pp > 1
        for one in candidates(where)
    ]
    return result, every


def test_enumeration_loses_nothing(small):
    result, every = small
    fitting = [point for _, point in every if result.fits(point)]
    assert result.best is not None
    assert result.best.iteration_us == min(point.iteration_us for point in fitting)
    assert len(result.points) < len(every)


def test_the_front_is_one(small):
    keys = [one.key() for one in small[0].front]
    assert keys == sorted(keys) and keys
    for key in keys:
        others = [other for other in keys if other != key]
        assert not any(all(a <= b for a, b in zip(other, key)) for other in others)


def test_points_are_what_simulate_says(small, tmp_path, capsys):
    path = tmp_path / "stages.json"
    points = {(p.spec.pp, p.name): p for _, p in small[1]}.values()
    assert len({point.spec.pp for point in points}) > 1
    for point in points:
        path.write_text(json.dumps(point.stage_cost()))
        assert cli.main(["simulate", "--json", *point.simulate_arguments(str(path))]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["makespan"] == point.makespan_us
        assert found["peak_activation"] == [float(x) for x in point.peak_activation]


def test_closed_forms_are_near(small):
    """An equal part for every rank; ends of the model are larger."""
    best = {}
    for one, point in small[1]:
        row = one.row
        key = row.job, row.family.name
        best.setdefault(key, (row, []))[1].append(point)
    for row, points in best.values():
        assert row.us == pytest.approx(min(float(p.iteration_us) for p in points), rel=0.2)
        assert 0.6 < row.bytes / min(p.worst.total for p in points) < 1.1
    assert len(best) == sum(len(every_row(where)) for where in spaces() if where.pp > 1)


def test_the_same_answer_every_time(small):
    again = search(spaces(), 30 * GIB, alone=False)
    assert [p.key() for p in again.points] == [p.key() for p in small[0].points]


def test_given_points_stay(small):
    """Whatever else is looked at, an answer is no slower than a point that was given."""
    for given in small[0].front:
        result = search(spaces(), 30 * GIB, given=[given], share=1e-4, alone=False)
        assert result.best.iteration_us <= given.iteration_us


def test_stock_is_what_megatron_runs():
    for where in spaces(f"{SMALL} --pp-vocab-parallel --pipeline-model-parallel-size 2"):
        found = candidates(of_stock(where))
        assert {one.spec.name for one in found} <= {"1f1b", "interleaved"}
        for one in found:
            assert one.workload.split.even and not one.workload.job.vocab_parallel
            assert one.spec.chunks == 1 or one.spec.microbatches % where.pp == 0
        assert {one.workload.job.recompute_granularity for one in found} == {None, "full"}


def test_no_pipeline_has_one_order():
    where = next(one for one in spaces() if one.pp == 1)
    job, m = where.jobs()[0]
    point = without_pipeline(where, job)
    (times,) = stage_times(job, Split((8,)), A100)
    assert float(point.makespan_us) == pytest.approx(1e6 * m * sum(times), rel=1e-3)
    assert not point.is_pipeline and point.simulate_arguments("x") == []
    assert "--pipeline-model-parallel-size 1" in point.flags()
    assert not any("--pp-" in words for words in point.flags())


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
    links = Links(A100)
    size = 8 * 10**9
    inside, across = links.ring(size, 8, 1), links.ring(size, 8, 8)
    assert inside == pytest.approx(7e9 / A100.peer, rel=0.01)
    assert across == pytest.approx(7e9 / A100.network, rel=0.01)
    # Two members of each node use two adapters.
    assert links.ring(size, 8, 4) == pytest.approx(across / 2, rel=0.01)
    assert links.ring(size, 1, 1) == 0.0


def test_what_data_parallel_ranks_exchange():
    job = next(j for j in divisions(given(WIDE)) if j.data_parallel_size == 8)
    links = Links(A100)
    gradients, parameters = links.data(job, Count(dense=10**9))
    assert gradients == pytest.approx(2 * parameters, rel=0.01), "fp32 gradients, bf16 parameters"
    whole = links.data(job.with_(use_distributed_optimizer=False), Count(dense=10**9))
    assert whole == (2 * gradients, 0.0), "all-reduced"
    two = job.with_(num_distributed_optimizer_instances=2)
    # Of 4 ranks each, and the shards all-reduced between both.
    parts = links.ring(4 * 10**9, 4, 1) + 2 * links.ring(10**9, 2, 4)
    assert links.data(two, Count(dense=10**9)) == (parts, links.ring(2 * 10**9, 4, 1))
    gathered = job.with_(recipe="tensorwise", quantized_parameters=True)
    halved = links.ring(10**9, 8, 1)
    assert links.data(gathered, Count(dense=10**9)) == (gradients, halved)
    assert links.data(gathered, Count(other=10**9)) == (gradients, parameters)
    mx = gathered.with_(recipe="mxfp8")
    assert links.data(mx, Count(dense=10**9)) == (gradients, parameters), "in 16 bits"
    rows = [stage_bytes(job, Split((8,)))]
    plain, hidden = (
        overhead(job, links, rows, [(10.0, 10.0)], [8], 4, overlap)
        for overlap in (Overlap(), Overlap(True, True))
    )
    assert plain.data > 0 and hidden.data == 0 and plain.optimizer == hidden.optimizer > 0


def test_attention_hides_context_parallel_exchange():
    jobs = divisions(given(SMALL.replace("length 4096", "length 16384")))
    job = next(j for j in jobs if j.context_parallel_size == 2)
    assert Links(A100).context(job) == (0.0, 0.0)
    slow = Links(A100.with_(peer=1e9)).context(job)
    assert slow[0] > 0 and slow[1] > slow[0]


def test_context_parallel_exchange_that_nothing_hides():
    """All-gathers of keys and values, in B twice; all-to-alls of queries and outputs too."""
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 --bf16 "
    line += "--group-query-attention --num-query-groups 2 --context-parallel-size 2 --cp-comm-type "
    fast = Links(A100)
    whole = 2 * 4096 * 64  # bytes of keys and values of the sequence
    gather, again = fast.context(job_of(read(f"{line} all_gather".split())[0]))
    assert gather == fast.ring(whole, 2, 1) > 0 and again == 2 * gather
    there, back = fast.context(job_of(read(f"{line} a2a".split())[0]))
    assert there == back == fast.ring(whole * 3 / 2, 2, 1)
    mixed, rings = (job_of(read(f"{line} {way}".split())[0]) for way in ("p2p a2a", "p2p"))
    assert mixed == rings and any("--cp-comm-type" in one for one in mixed.assumptions)
