"""A sharded vocabulary in the planner: parameters, times, bytes, and which searches try it."""

from __future__ import annotations

import pytest

from megatron_ext.plan.activations import stage_set, with_shard
from megatron_ext.plan.flags import job_of, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.layout import even_split
from megatron_ext.plan.memory import rank_bytes, stage_bytes, states_of
from megatron_ext.plan.model import PlanError
from megatron_ext.plan.point import evaluate
from megatron_ext.plan.search import search
from megatron_ext.plan.space import SearchSpace
from megatron_ext.plan.times import stage_times, vocabulary_times
from megatron_ext.plan.vocabulary import settings
from megatron_ext.schedule import Placement
from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.vocabulary import E, G, S, T

from .every import candidates

LLAMA_3_8B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --seq-length 8192 --bf16 "
    "--vocab-size 128256 --hidden-dropout 0 --attention-dropout 0"
)
UNTIED = "--untie-embeddings-and-output-weights"
MTP = "--mtp-num-layers 2"
ROPE = "--position-embedding-type rope"
SMALL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --bf16 --swiglu "
    "--vocab-size 128000 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer "
    f"{UNTIED}"
)
GIB = 2**30


def job(*words, line=LLAMA_3_8B, pp=8, batch=16):
    text = f"{line} --pipeline-model-parallel-size {pp} --world-size {pp} {' '.join(words)}"
    return job_of(read(f"{text} --global-batch-size {batch}".split())[0])


def both(*words, **more):
    """The job without and with a sharded vocabulary."""
    return job(*words, **more), job("--pp-vocab-parallel", *words, **more)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vee", [True, False])
def test_ranks_have_equal_parameters(tied, vee):
    whole, sharded = both("" if tied else UNTIED)
    placement = Placement.vee(8) if vee else Placement.loop(8, 1)
    split = even_split(32, placement.num_stages)
    rows = {
        name: [
            sum(stage_bytes(each, split)[s].parameters.total for s in stages)
            for stages in placement.stages
        ]
        for name, each in (("whole", whole), ("sharded", sharded))
    }
    mean = sum(rows["sharded"]) / 8
    assert all(abs(n - mean) < 0.05 * mean for n in rows["sharded"])
    assert rows["whole"][0] > 1.2 * sum(rows["whole"]) / 8, "the embedding alone is so much"
    # Stock has two copies of tied weights, on the first and on the last stage.
    copies = sharded.padded_vocab_size * 4096 * tied
    assert sum(rows["sharded"]) == sum(rows["whole"]) - copies
    states = states_of(placement, stage_bytes(sharded, split))
    assert max(s.total for s in states) < 1.05 * min(s.total for s in states)


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_times_of_all_shards_are_the_whole_output_layers(gpu):
    whole, sharded = both(UNTIED)
    device, split = gpu_of(gpu), even_split(32, 8)
    times = stage_times(whole, split, device)
    output = sum(times[-1]) - sum(times[1])
    s, t, e, g, latency = vocabulary_times(sharded, device)
    # Narrower products take a little longer.
    assert output < 8 * (s + t) < 1.2 * output
    assert 0 < e < g < s / 10 and latency > 0
    assert vocabulary_times(whole, device) is None
    # What is left on the ends is a norm.
    own = stage_times(sharded, split, device)
    assert own[0] == own[1] and sum(own[-1]) < 1.01 * sum(own[1])


def test_bytes_from_s_to_t():
    """Counted by hand: two microbatches between S and T at the peak, and S's own logits."""
    each = job(UNTIED, "--pp-vocab-parallel", pp=2)
    stages = stage_bytes(each, even_split(32, 2))
    row = [(S, 0), (S, 1), (T, 0), (T, 1)]
    actions = tuple(Action(op, 0, j) for op, j in row)
    schedule = Schedule("x", Placement.loop(2, 1), 2, (actions, ()))
    rank = rank_bytes(schedule, stages, 0)[0]
    sets = stages[0].sets
    assert rank.kept + rank.passing == 2 * sets.shard + sets.scores
    assert (rank.kept, rank.at) == (2 * sets.shard, "S0.1")
    forward = tuple(Action(Op.F, 0, j) for j in range(2))
    alone = rank_bytes(Schedule("x", Placement.loop(2, 1), 2, (forward, ())), stages, 0)[0]
    assert alone.kept == 2 * sets.bytes_f_to_b, "a shard is kept for no other pass"


def test_multi_token_prediction():
    """Counted by hand: every depth is one more of the loss, and of what it needs."""
    plain, deep = (job(UNTIED, "--pp-vocab-parallel", more, pp=4) for more in ("", MTP))
    split, gpu = even_split(32, 4), gpu_of("H100")
    before, after = vocabulary_times(plain, gpu), vocabulary_times(deep, gpu)
    assert after[:4] == pytest.approx([3 * x for x in before[:4]])
    assert before[4] < after[4] < 3 * before[4]
    hidden = 2 * 8192 * 4096
    sets, more = (
        with_shard(each, stage_set(each, even_split(32, 1).stages[0])) for each in (plain, deep)
    )
    assert (more.shard, more.scores) == (3 * sets.shard, 3 * sets.scores)
    assert (sets.waiting, more.waiting) == (0, 2 * hidden)
    # The last stage has their layers, and no second embedding.
    rows = [[one.parameters.total for one in stage_bytes(each, split)] for each in (plain, deep)]
    assert rows[0][:-1] == rows[1][:-1]
    layer = stage_bytes(plain, even_split(32, 32))[8].parameters.total
    assert 2 * layer < rows[1][-1] - rows[0][-1] < 2.4 * layer
    whole = job(UNTIED, MTP, pp=4)
    assert stage_times(whole, split, gpu)[-1].forward > stage_times(deep, split, gpu)[-1].forward
    assert settings(whole, choose=True) == (False, True)


def test_embeddings_that_wait_for_the_last_stage():
    """Counted by hand: from E to F, and their gradient from B to G."""
    each = job(UNTIED, "--pp-vocab-parallel", MTP, pp=2)
    stages = stage_bytes(each, even_split(32, 2))
    own, waiting = stages[1].sets, stages[1].sets.waiting

    def kept(*row):
        actions = tuple(Action(op, 1, j) for op, j in row)
        return rank_bytes(Schedule("x", Placement.loop(2, 1), 2, ((), actions)), stages, 0)[1].kept

    assert waiting == 2 * 2 * 8192 * 4096
    assert kept((E, 0), (E, 1)) == 2 * waiting
    assert kept((E, 0), (E, 1), (Op.F, 0)) == waiting + own.bytes_f_to_b
    begun = [(E, 0), (Op.F, 0), (Op.BW, 0), (E, 1), (E, 2)]
    passes = [(Op.F, 1), (Op.F, 2)]
    assert kept(*begun, *passes, (G, 0)) == waiting + 2 * own.bytes_f_to_b
    assert kept(*begun, (G, 0), *passes) == 2 * own.bytes_f_to_b


@pytest.mark.parametrize(
    "words",
    [
        ["--padded-vocab-size", "128260"],
        [MTP, "--pipeline-model-parallel-layout", "Et*5|(tttt|)*5t*7m|L"],
    ],
)
def test_what_training_does_not_shard(words):
    assert settings(job(*words), choose=True) == (False,)


def test_the_vocabulary_is_padded_for_all_ranks():
    assert job(pp=6).padded_vocab_size == 128256
    line = LLAMA_3_8B.replace("--num-layers 32", "--num-layers 35")
    assert job("--pp-vocab-parallel", line=line, pp=7).padded_vocab_size % (7 * 128) == 0
    alone = job("--pp-vocab-parallel", line=LLAMA_3_8B, pp=1)
    assert not alone.vocab_parallel and alone.words == 128256


def space(*words, line=SMALL, pp=4, **changes):
    options = {
        "gpu": gpu_of("A100"),
        "schedules": ("1f1b", "v-half"),
        "cheap_recompute": (False,),
        "offload": (),
    }
    return SearchSpace(job(*words, line=line, pp=pp), pp=pp, **{**options, **changes})


@pytest.mark.parametrize(
    ("words", "schedules", "most"),
    [((), ("1f1b", "zb-h1", "v-half"), 1.1), ((MTP, ROPE), ("v-half",), 1.15)],
    ids=["plain", "depths"],
)
def test_likely_times_and_bytes_are_near(words, schedules, most):
    for one in candidates(space("--pp-vocab-parallel", *words, schedules=schedules)):
        point = evaluate(one.spec, one.workload)
        assert 0.8 < float(point.iteration_us) / one.us < 1.1
        assert 0.95 < point.worst.total / one.bytes < most


def test_a_search_tries_both_and_takes_the_faster():
    result = search([space(vocabulary=True)], 40 * GIB)
    alone = search([space()], 40 * GIB)
    best = result.best
    assert best is not None and alone.best is not None
    assert best.workload.job.vocab_parallel and best.spec.barriers == 1
    assert best.makespan_us < 0.95 * alone.best.makespan_us
    assert "--pp-vocab-parallel" in best.flags()
    assert not any("--pp-vocab-parallel" in p.flags() for p in alone.points)
    # A vocabulary of no weight is not worth its collectives.
    few = SMALL.replace("128000", "1024")
    small = search([space(line=few, schedules=("v-zb",), vocabulary=True)], 40 * GIB).best
    assert small is not None and not small.workload.job.vocab_parallel


def test_a_flag_keeps_the_search_to_it():
    result = search([space("--pp-vocab-parallel", vocabulary=True)], 40 * GIB)
    assert result.points and all(p.spec.barriers == 1 for p in result.points)
    with pytest.raises(PlanError, match="none of dualpipev is possible"):
        search([space("--pp-vocab-parallel", schedules=("dualpipev",))], 40 * GIB)
