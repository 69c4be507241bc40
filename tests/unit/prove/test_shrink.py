"""What stays of a large configuration, and what does not."""

from __future__ import annotations

import pytest

from megatron_ext.prove.flags import Flags
from megatron_ext.prove.shrink import frequencies, hybrid, layout
from megatron_ext.prove.shrink import shrink as made_small

LLAMA = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
--swiglu --micro-batch-size 4 --global-batch-size 1024 --bf16 --tensor-model-parallel-size 8
--pipeline-model-parallel-size 16 --sequence-parallel --use-distributed-optimizer
--save /nowhere --attention-dropout 0.1 --tp-comm-overlap --recompute-granularity selective"""
EXPERTS = """--num-experts 256 --moe-router-topk 8 --expert-model-parallel-size 64
--expert-tensor-parallel-size 1 --moe-token-dispatcher-type flex --moe-expert-capacity-factor 1
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-layer-freq ([0]*3+[1]*29)"""


def shrink(text, **options):
    return made_small(text.split(), **options)


def value(shrunk, name):
    return shrunk.flags.values(name)


def test_sizes_shrink_and_the_layout_stays():
    small = shrink(LLAMA, world=512)
    assert value(small, "--tensor-model-parallel-size") == ["2"]
    assert value(small, "--pipeline-model-parallel-size") == ["4"]
    assert value(small, "--num-layers") == ["4"]
    assert small.world == 16  # two data-parallel ranks
    assert int(value(small, "--global-batch-size")[0]) == 12 * 2 * 2
    heads, groups = (
        int(value(small, f"--num-{n}")[0]) for n in ("attention-heads", "query-groups")
    )
    assert heads > groups and groups % 2 == 0
    for name in ("--sequence-parallel", "--swiglu", "--recompute-granularity"):
        assert name in small.flags
    assert "--save" not in small.flags
    lost = dict(small.lost)
    assert lost["--bf16"] == "runs are in float64" and lost["--tp-comm-overlap"] == "needs a GPU"
    assert not small.ours


def microbatches(text, number, world=2):
    small = shrink(f"{text} --num-layers 8 --global-batch-size {number}", world=world)
    return value(small, "--global-batch-size"), [flag for flag, _ in small.lost]


def test_microbatches_are_more_than_a_round_and_divide_as_the_commands_do():
    pp = "--pipeline-model-parallel-size 2"
    assert microbatches(pp, 64) == (["6"], [])
    assert microbatches(pp, 63) == (["5"], [])
    assert microbatches(pp, 3) == (["3"], []) and microbatches(pp, 1) == (["1"], [])
    virtual = f"{pp} --num-layers-per-virtual-pipeline-stage 2"
    assert microbatches(virtual, 64) == (["6"], [])


def test_a_reference_has_the_model_and_no_layout():
    small = shrink(LLAMA + " --pp-schedule v-half")
    assert small.ours and "--pp-schedule" not in small.stock
    alone = small.reference()
    for name in ("--tensor-model-parallel-size", "--sequence-parallel", "--pp-schedule"):
        assert name not in alone
    assert "--swiglu" in alone and value(small, "--num-layers") == ["8"]
    divisible = "--make-vocab-size-divisible-by"
    padded = small.flags.number(divisible, 0) * 2
    assert alone.number(divisible, 0) == padded == small.flags.number("--vocab-size", 0) + 1


def test_experts():
    small = shrink(LLAMA + " " + EXPERTS)
    assert value(small, "--num-experts") == ["4"] and value(small, "--moe-router-topk") == ["2"]
    assert value(small, "--moe-layer-freq") == ["[0,1,1,1]"]
    assert value(small, "--moe-token-dispatcher-type") == ["alltoall"]
    assert "--moe-expert-capacity-factor" not in small.flags
    lost = dict(small.lost)
    assert "depends on the layout" in lost["--moe-expert-capacity-factor 1"]
    assert lost["--moe-token-dispatcher-type flex"] == "needs a GPU"


def test_experts_have_the_data_parallel_ranks_that_megatron_asks_for():
    text = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-experts 8 "
    both = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2"
    small = shrink(f"{text}{both} --use-tp-pp-dp-mapping", world=8)
    assert value(small, "--expert-tensor-parallel-size") == ["1"] and small.world == 4
    small = shrink(f"{text}{both} --num-distributed-optimizer-instances 4", world=64)
    assert value(small, "--num-distributed-optimizer-instances") == ["2"] and small.world == 16
    small = shrink("--num-layers 4 --num-distributed-optimizer-instances 2", world=8)
    assert small.world == 2


def test_muon_becomes_adam():
    small = shrink("--num-layers 4 --optimizer muon --muon-momentum 0.9")
    assert value(small, "--optimizer") == ["adam"] and "--muon-momentum" not in small.flags
    assert ("--optimizer muon", "orthogonalizes each rank's part of a weight") in small.lost


def test_the_ranks_limit_the_layout():
    assert shrink(LLAMA, ranks=8).world == 8
    four = shrink(LLAMA, ranks=4)
    assert four.world == 4 and value(four, "--pipeline-model-parallel-size") == ["2"]
    with pytest.raises(ValueError, match=r"has 4 ranks .* --ranks allows 2"):
        shrink(LLAMA, ranks=2)


@pytest.mark.parametrize(
    "text, message",
    [
        ("--num-layers many", "not a whole number"),
        ("32 --bf16", "where a flag"),
        ("--num-layers 4 --use-megatron-fsdp", "does not run on CPU ranks"),
        ("--num-layers 4 --moe-layer-freq __import__('os')", "neither a number nor a list"),
    ],
)
def test_what_cannot_be_shrunk(text, message):
    with pytest.raises(ValueError, match=message):
        shrink(text)


def test_layouts_keep_ends_and_kinds_of_stages():
    assert layout("Et*3|(tt|)*29m|L", 8) == ("Et|t|t|t|t|t|m|L", 6)
    assert layout("Ett|tt|tt|ttL", 4) == ("Et|t|t|tL", 4)
    assert layout("Et|tttt|tttt|tL", 4) == ("Et|tt|tt|tL", 6)


def test_patterns():
    assert frequencies("([0]*3+[1]*58)", 8) == "[0,1,1,1,1,1,1,1]"
    assert frequencies("6", 8) == "4" and frequencies("1", 8) == "1"
    assert hybrid("M-M-M*-M-M-M*-", 4) == ("M*M-", 4)
    text, number = hybrid("MM*-|MM*-|MM*-|MM*-/MM/MM", 4)
    assert text.count("|") == 3 and text.endswith("/MM/MM") and number == 4


def test_flags_keep_the_last_value():
    flags = Flags(["--a", "1", "--b=2", "--a", "3", "4"])
    assert flags.words == ["--b", "2", "--a", "3", "4"]


@pytest.mark.parametrize(
    "text", ["[0]*10**9", "[0]*1000000*[1]", "10000000000*[1]", "(((", "[[1]]*2", "-1", "[0]+1"]
)
def test_what_no_list_of_layers_is(text):
    """Nor one that would fill the memory."""
    with pytest.raises(ValueError, match="neither a number nor a list"):
        frequencies(text, 4)


def test_lists_and_layouts_are_read_as_plan_reads_them():
    assert frequencies("([0]*3+[1]*58)", 4) == "[0,1,1,1]"
    assert layout("E(t*2|(tt|)*2)*2L", 4) == ("Et|t|t|L", 3)
    with pytest.raises(ValueError, match="more than"):
        layout("E(t*99999|)*99999L", 4)


def test_slices_of_so_many_tokens_are_as_many_slices():
    """A proof's sequences are short; its microbatches keep their places."""
    line = "--seq-length 8192 --num-layers 4 --pipeline-model-parallel-size 2 --pp-schedule v-half "
    small = shrink(f"{line} --pp-slice-tokens 3000")
    assert value(small, "--pp-slices") == ["3"] and "--pp-slice-tokens" not in small.flags
    assert value(shrink(f"{line} --pp-slice-tokens 8192"), "--pp-slices") == ["1"]
    more = "--pp-microbatch-costs lengths --pp-reorder-microbatches"
    small = shrink(f"{line} {more}")
    assert "--pp-reorder-microbatches" not in small.flags and "--pp-microbatch-costs" in small.flags
    assert ("--pp-reorder-microbatches", "small runs have none") in small.lost
