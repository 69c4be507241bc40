"""MoE layers in chunks in the planner: bytes and times of a job, rates, what a search proposes."""

from __future__ import annotations

import math

import pytest

from megatron_ext.moe.plan import STOCK, LayerPlan, Strategy, saved_bytes
from megatron_ext.plan.activations import sums
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.kinds import layer
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import rank_bytes, stage_bytes
from megatron_ext.plan.mlp import _routing, routed_tokens
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.moe_job import buffer_bytes, fixed_plan, shape_of
from megatron_ext.plan.moe_times import (
    exchange_rate,
    job_run,
    pass_time,
)
from megatron_ext.plan.parts import exchange
from megatron_ext.plan.search import search
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.times import moe_variants, price_of, stage_times
from megatron_ext.schedule.generators import generate

SPREAD = (  # experts over 4 nodes: the network binds
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --swiglu "
    "--disable-bias-linear --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 "
    "--moe-grouped-gemm --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
    "--vocab-size 64000 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer "
    "--pipeline-model-parallel-size 4 --world-size 128 --global-batch-size 256 "
    "--moe-token-dispatcher-type alltoall"
)
TWO = "--tensor-model-parallel-size 2 --sequence-parallel"
DENSE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
RESTORING = [one.value for one in Strategy if one is not Strategy.NONE]
PLANS = [(n, one.value) for n in (1, 2, 4, 8) for one in Strategy]


def job(*more, line=SPREAD):
    return job_of(read(f"{line} {' '.join(more)}".split())[0])


def chunked(n, strategy, *more):
    return job(f"--moe-pipeline-chunks {n} --moe-memory-reuse {strategy}", *more)


# --- bytes ---


@pytest.mark.parametrize(("n", "strategy"), PLANS)
@pytest.mark.parametrize("more", ["", "--moe-latent-size 1024 --moe-ffn-hidden-size 512"])
def test_bytes_of_strategies(n, strategy, more):
    """Kept: less by what ``saved_bytes`` says."""
    stock, ours = job(more), chunked(n, strategy, more)
    plan, shape, rows = LayerPlan.of(n, strategy), shape_of(ours), routed_tokens(ours)
    (kept, waiting, again), (less, waits, extra) = (
        sums(one, layer(one, one.layers[0])) for one in (stock, ours)
    )
    assert kept - less == saved_bytes(shape, rows, Strategy.NONE) - saved_bytes(
        shape, rows, plan.strategy
    )
    assert extra == again
    # Inputs and output gradients of fc1 and fc2: none waits for W where T_DI is restored.
    row = shape.element_bytes * (shape.hidden + shape.ffn + 2 * shape.ffn + shape.hidden)
    assert waiting - waits == (rows * row if strategy not in ("none", "s0") else 0)
    sets = stage_bytes(ours, even_split(8, 4))[1].sets
    if plan.stock:
        assert sets == stage_bytes(stock, even_split(8, 4))[1].sets
        return
    assert sets.buffers == buffer_bytes(shape, rows, plan)
    assert sets.host == 2 * round(
        rows * 2 * (shape.hidden * (strategy in ("s1", "s3")))
        + rows * shape.inside_bytes * (strategy in ("s1", "s2"))
    )


def test_what_the_unmodified_layer_keeps_is_what_was_counted():
    """The planner's own sum, with fp32 probabilities where the formula has 16-bit ones."""
    this = job()
    kept = sum(
        tensor.bytes_f_to_b
        for part in layer(this, this.layers[0])
        for tensor in part.tensors(this)
        if "experts'" in tensor.what or "routed tokens" in tensor.what
    )
    rows = routed_tokens(this)
    assert kept == saved_bytes(shape_of(this), rows, Strategy.NONE) + (4 - 2) * rows


def test_buffers_are_there_once_and_host_bytes_with_every_set():
    schedule = generate("interleaved", 4, 8, 2)
    for strategy, many in (("s1", True), ("s4", False)):
        ours = chunked(4, strategy)
        stages = stage_bytes(ours, even_split(8, 8))
        ranks = rank_bytes(schedule, stages, 0)
        bare = [s._replace(sets=s.sets._replace(buffers=0)) for s in stages]
        for one, less in zip(ranks, rank_bytes(schedule, bare, 0)):
            assert one.total - less.total == stages[0].sets.buffers
        assert (ranks[0].host > 0) is many
        assert ranks[0].host % stages[0].sets.host == 0 if many else True


# --- times ---


@pytest.mark.parametrize("more", ["", "--cross-entropy-loss-fusion", "--mtp-num-layers 1"])
@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_one_chunk_with_nothing_restored_is_megatrons_layer(gpu, more):
    one, stock, device = chunked(1, "none", more), job(more), gpu_of(gpu)
    assert fixed_plan(one) is None
    split = even_split(8, 4)
    assert stage_times(one, split, device) == stage_times(stock, split, device)
    # What is simulated for it is what the planner has for these parts of the layer.
    run = job_run(stock, device, price_of(stock, device), STOCK)
    whole = sum(price_of(stock, device)(layer(stock, stock.layers[0])[1]))
    assert 0.5 * whole < run.time < whole


@pytest.mark.parametrize(("n", "strategy"), [(2, "none"), (4, "none"), (2, "s1"), (4, "s4")])
def test_stages_gain_what_the_layer_gains(n, strategy):
    stock, ours, gpu = job(), chunked(n, strategy), gpu_of("H100")
    price = price_of(stock, gpu)
    fast, slow = (job_run(stock, gpu, price, plan) for plan in (LayerPlan.of(n, strategy), STOCK))
    old, new = (stage_times(one, even_split(8, 4), gpu)[1] for one in (stock, ours))
    gains = (
        fast.forward - slow.forward,
        fast.backward - slow.backward,
        fast.weights - slow.weights,
    )
    for before, after, gain in zip(old, new, gains):
        assert after - before == pytest.approx(2 * gain, rel=1e-9)
    if strategy == "none":
        assert sum(new) < 0.9 * sum(old)


def test_few_rows_an_expert_make_chunks_slower():
    """In a node little is to be hidden, and every chunk reads all weights of its experts and adds
    to all their fp32 gradients: with few rows an expert in a call, no chunks at all."""
    gpu = gpu_of("H100")
    for rows in (512, 256, 128):
        this = job(f"--expert-model-parallel-size 8 --seq-length {2 * rows}")
        assert routed_tokens(this) == 16 * rows
        price = price_of(this, gpu)
        times = [job_run(this, gpu, price, LayerPlan(n)).time for n in (1, 2, 4, 8)]
        assert times == sorted(times) and times[3] > 2 * times[0]
    found = plans_of("--expert-model-parallel-size 8 --seq-length 1024")
    assert all(one is None or one.strategy is not Strategy.NONE for one in found)


# --- all-to-alls ---


def test_all_to_alls_use_the_network_beyond_a_node():
    gpu = gpu_of("H100")
    rate = {ep: exchange_rate(job(f"--expert-model-parallel-size {ep}"), gpu) for ep in (8, 16, 32)}
    assert rate[8] == gpu.peer
    # 8 of the 15 other ranks are on the other node, 24 of 31 on the other three.
    assert rate[16] == pytest.approx(gpu.network * 15 / 8)
    assert rate[32] == pytest.approx(gpu.network * 31 / 24)
    assert exchange_rate(job(), gpu.with_(devices_per_node=32)) == gpu.peer
    assert exchange_rate(job(), gpu_of("GB200")) == gpu_of("GB200").peer
    assert exchange_rate(job(), gpu.with_(exchange=7e9)) == 7e9
    # Expert tensor parallelism takes its share of a node.
    split = job("--expert-tensor-parallel-size 2 --expert-model-parallel-size 8")
    assert exchange_rate(split, gpu) == pytest.approx(gpu.network * 7 / 4)
    assert exchange_rate(job(), gpu.with_(peer=math.inf, network=math.inf)) == math.inf


def test_a_flex_dispatcher_sends_a_token_once_to_each_node():
    """128 experts on 4 nodes, top-8: 3.63 of 4 nodes are expected; the last hop is in the node."""
    gpu = gpu_of("H100")
    flex = job("--moe-token-dispatcher-type flex")
    nodes = 4 * (1 - math.comb(96, 8) / math.comb(128, 8))
    assert nodes == pytest.approx(3.63, abs=0.005)
    assert exchange_rate(flex, gpu) == pytest.approx(gpu.network * 31 / 24 * 8 / nodes)
    assert moe_variants(flex, gpu) == [flex]


@pytest.mark.parametrize(
    ("more", "sent", "gathered"),
    [
        ("", 8 * 31 / 32, 0),
        # Sequence-parallel ranks have half of the tokens each, and get those of the other.
        (f"{TWO} --expert-tensor-parallel-size 2 --expert-model-parallel-size 8", 4 * 7 / 8, 4),
        (f"{TWO} --expert-tensor-parallel-size 2 --expert-model-parallel-size 1", 0, 4),
        # With more ranks to an expert than to other weights each has tokens of its own.
        ("--expert-tensor-parallel-size 2 --expert-model-parallel-size 8", 8 * 7 / 8, 8),
        # All tokens of all ranks, whatever experts they go to; Megatron's default.
        ("--moe-token-dispatcher-type allgather", 31, 0),
        (f"{TWO} --moe-token-dispatcher-type allgather --expert-model-parallel-size 16", 15 / 2, 0),
    ],
)
def test_what_a_dispatcher_exchanges(more, sent, gathered):
    """Rows that a rank gets, each of them there and back."""
    one = job(more)
    work, row = _routing(one, routed_tokens(one)), 2 * 2 * 4096 * 4096  # of a sequence's tokens
    assert work.expert_bytes == pytest.approx(row * sent)
    assert (work.tensor_bytes, work.collectives) == (row * gathered, 2 * (gathered > 0))


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("", 32 * 4096),
        (f"{TWO} --expert-tensor-parallel-size 2 --expert-model-parallel-size 16", 16 * 4096),
        ("--expert-model-parallel-size 1", 0),
        ("--moe-token-dispatcher-type alltoall", 0),
        ("--moe-pipeline-chunks 2", 0),  # which have all-to-alls of their own
    ],
)
def test_an_allgather_holds_the_tokens_of_all_ranks(more, tokens):
    """In a buffer that stays, and once more as gradients in B."""
    one = job("--moe-token-dispatcher-type allgather", more)
    same = one.with_(moe_token_dispatcher_type="alltoall")
    part, before = (layer(this, this.layers[0])[1] for this in (one, same))
    assert part.buffers - before.buffers == 2 * 4096 * tokens
    assert part.widest == max(before.widest, 2 * 4096 * tokens)


def test_ranks_that_share_an_expert_have_the_rows_of_all_of_them():
    """As training counts them (``features/moe/flags.py``)."""
    more = "--expert-model-parallel-size 8 --expert-tensor-parallel-size 2"
    assert routed_tokens(job(more)) == 2 * routed_tokens(job())
    assert routed_tokens(job(more, TWO)) == routed_tokens(job())


def test_a_shared_expert_is_tensor_parallel():
    experts_alone, with_shared = (
        layer(one, one.layers[0])[1].work
        for one in (job(TWO), job(TWO, "--moe-shared-expert-intermediate-size 1536"))
    )
    assert with_shared.tensor_bytes - experts_alone.tensor_bytes == exchange(job(TWO)).tensor_bytes
    assert with_shared.collectives - experts_alone.collectives == 2


def test_all_gathers_take_a_ring_and_chunks_do_not():
    gpu, plan = gpu_of("H100"), LayerPlan.of(2, "none")
    gathers, sends = job("--moe-token-dispatcher-type allgather"), job()
    assert exchange_rate(gathers.with_(expert_model_parallel_size=8), gpu) == gpu.peer
    # Members of a node use all of its adapters.
    slow = gpu.with_(network=gpu.peer / 10)
    assert exchange_rate(gathers, slow) == pytest.approx(0.8 * gpu.peer)
    calls = [job_run(one, gpu, price_of(one, gpu), plan) for one in (gathers, sends)]
    assert calls[0].time == pytest.approx(calls[1].time)
    stock = [job_run(one, gpu, price_of(one, gpu), STOCK) for one in (gathers, sends)]
    assert stock[0].time != pytest.approx(stock[1].time, rel=0.01)


# --- what a search proposes ---


def plans_of(*more, gpu="H100", line=SPREAD):
    this, device = job(*more, line=line), gpu_of(gpu)
    return [fixed_plan(one) for one in moe_variants(this, device)]


def test_variants():
    """Of all plans that the flags allow those that no other one beats in time and memory."""
    found = plans_of()
    assert found[0] is None and found[1].strategy.keeps_products and found[1].chunks > 1
    assert found[2:] and len({one.strategy for one in found[1:]}) > 1
    assert plans_of("--moe-pipeline-chunks off") == [None]
    assert plans_of("--moe-pipeline-chunks 4") == [LayerPlan(4)]
    assert plans_of("--moe-pipeline-chunks 4 --moe-memory-reuse s4") == [LayerPlan.of(4, "s4")]
    found = plans_of("--moe-pipeline-chunks 4 --moe-memory-reuse auto")
    assert {one.chunks for one in found} == {4} and len(found) > 1
    found = plans_of("--moe-pipeline-chunks auto --moe-memory-reuse s1")
    assert {one.strategy for one in found} == {Strategy.S1}
    assert plans_of("--fp8-format hybrid") == [None]  # delayed scales
    assert len(plans_of("--fp8-format hybrid --fp8-recipe blockwise")) > 1
    assert plans_of(line=f"{DENSE} --pipeline-model-parallel-size 4") == [None]


def test_the_closed_form_of_paradigm_1():
    """MPMoE's, without copies; by hand, and its example of 8 chunks."""
    assert pass_time(1, 1.0, 2.0, 3.0) == 6
    assert pass_time(3, 1.0, 2.0, 1.0) == 1 + 2 + 2 + 2 + 1
    assert pass_time(8, 1.0, 1.75, 1.0) == 17.5


def test_copies_hold_back_the_chunks_whose_memory_they_read():
    """By hand: a third chunk's experts wait for the first one's copy to the host, and a chunk's
    for its own copy back."""
    assert pass_time(4, 0.0, 1.0, 0.0, saved=10.0) == 1 + 2 * 10 + 1
    assert pass_time(4, 0.0, 1.0, 0.0, loaded=10.0) == 4 * 10 + 1


def test_moe_act_makes_none_s0():
    """As in training: what Megatron would recompute in its layer, chunks recompute."""
    recompute = "--recompute-granularity selective --recompute-modules moe_act --moe-grouped-gemm"
    both = chunked(2, "none", recompute), chunked(2, "s0")
    assert [fixed_plan(one) for one in both] == [LayerPlan.of(2, "s0")] * 2
    assert fixed_plan(job(recompute)) is None
    bytes_of = [stage_bytes(one, even_split(8, 4))[1].sets for one in (*both, chunked(2, "none"))]
    first, second, whole = (sets.bytes_f_to_b for sets in bytes_of)
    assert first == second < whole


def test_the_search_takes_chunks_where_they_are_faster():
    this = job()
    space = SearchSpace(this, gpu_of("H100"), 4, ("1f1b", "v-half"), cheap_recompute=(False,))
    free = search([space], 79 * 2**30)
    best = free.best
    assert fixed_plan(best.workload.job).strategy.keeps_products
    chunks = fixed_plan(best.workload.job).chunks
    assert any(word.startswith(f"--moe-pipeline-chunks {chunks}") for word in best.flags())


# --- bad input ---


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--moe-pipeline-chunks 3", "must be one of off, auto, 1, 2, 4, 8, got '3'"),
        ("--moe-pipeline-chunks 2 --moe-memory-reuse s7", "one of none, s0, s1, s2, s3, s4, auto"),
        (
            "--moe-pipeline-chunks 2 --moe-token-dispatcher-type flex",
            "flex is not modelled",
        ),
        ("--num-experts 100", "--num-experts 100 cannot be divided by 32"),
        ("--tensor-model-parallel-size 2", "size 2 only beside --sequence-parallel; give it too"),
    ],
)
def test_bad_input(flags, words):
    with pytest.raises(PlanError, match=words):
        job(flags)
