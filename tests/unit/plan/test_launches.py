"""What the device waits for the host to launch."""

from __future__ import annotations

import pytest

from megatron_ext.plan.flags import job_of, notes_on, read
from megatron_ext.plan.gpu import gpu_of
from megatron_ext.plan.launches import ATTENTION, HOST_S
from megatron_ext.plan.layout import Split
from megatron_ext.plan.times import stage_times

MODEL = "--num-layers 1 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --bf16 "
LAYER = Split((0, 1, 0))


def _graphs(words, more=""):
    flags = MODEL + "--num-experts 8 --moe-grouped-gemm " + more + words
    job = job_of(read(flags.split())[0])
    return job.graphed, stage_times(job, LAYER, gpu_of("H100"))[1]


class TestHost:
    """The device waits for the host in layers with experts, but in CUDA graphs."""

    @pytest.mark.parametrize(
        ("words", "modules"),
        [
            ("", ()),
            ("--cuda-graph-impl none --cuda-graph-scope attn", ()),
            ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router",
             ("attn", "moe_router")),
            ("--cuda-graph-impl local --cuda-graph-modules attn", ("attn",)),
            ("--cuda-graph-impl local", ("whole",)),
            ("--cuda-graph-impl full_iteration", ("whole", "full_iteration")),
            ("--cuda-graph-impl local --cuda-graph-scope full_iteration",
             ("whole", "full_iteration")),
            ("--enable-cuda-graph", ("whole",)),
            ("--external-cuda-graph --cuda-graph-scope attn", ("attn",)),
        ],
    )  # fmt: skip
    def test_graphs_by_flags_of_all_versions(self, words, modules):
        assert _graphs(words)[0] == modules

    def test_what_graphs_hold_costs_no_launches(self):
        eager, some, whole = (
            _graphs(f"--cuda-graph-impl {words}")[1]
            for words in ("none", "transformer_engine --cuda-graph-scope attn", "full_iteration")
        )
        for number, kernels in enumerate(ATTENTION):
            saved = eager[number] - some[number]
            assert saved == pytest.approx(HOST_S * kernels)
        assert sum(eager) > sum(some) > sum(whole)

    def test_experts_in_fp8_launch_most(self):
        fp8 = "--fp8-format e4m3 --fp8-recipe mxfp8 "

        def host(more):
            graphs = "--cuda-graph-impl full_iteration"
            return sum(_graphs("", more)[1]) - sum(_graphs(graphs, more)[1])

        assert host(fp8) - host("") == pytest.approx(HOST_S * 8 * (22 - 6))
        assert host(fp8 + "--use-transformer-engine-op-fuser ") < host("")

    def test_dense_models_have_no_such_wait(self):
        job = job_of(read(MODEL.split())[0])
        graphed = job.with_(graphed=("whole",))
        assert stage_times(job, LAYER, gpu_of("H100")) == stage_times(
            graphed, LAYER, gpu_of("H100")
        )

    def test_graphs_are_known_flags(self):
        found, ignored = read(["--cuda-graph-impl", "local", "--cuda-graph-scope", "attn", "--foo"])
        assert found["graphed"] == ("attn",) and ignored == ["--foo"]

    def test_a_flag_that_hides_an_exchange_has_a_note(self):
        ignored = read(["--overlap-dispatch-backward-with-experts-wgrad", "--foo"])[1]
        (note,) = notes_on(ignored)
        assert note.endswith("is not counted")
