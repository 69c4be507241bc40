"""Values of Megatron's flags that a CPU run needs, and those that mean "not in use"."""

from __future__ import annotations

# On CPU ranks: values that a run needs (another one is an error), those it gets where none is
# given, and switches.
CPU_NEEDS = {"--distributed-backend": "gloo", "--transformer-impl": "local"}
CPU_DEFAULTS = {"--num-workers": "0"}
CPU_SWITCHES = (
    "--use-cpu-initialization",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)
# Values that mean "not in use".
NEUTRAL = {
    **dict.fromkeys(("--attention-dropout", "--hidden-dropout"), ("0", "0.0")),
    **{"--moe-input-jitter-eps": ("0", "0.0"), "--lr-decay-style": ("constant",)},
    **{"--rerun-mode": ("disabled",), "--cuda-graph-impl": ("none",), "--pp-offload": ("off",)},
    **{"--context-parallel-size": ("1",), "--num-distributed-optimizer-instances": ("1",)},
    **{"--mlp-chunks-for-training": ("1",), "--cpu-offloading-num-layers": ("0",)},
}
