"""Cheap recompute: what norms and activation functions give is computed again in backward.

Of the 34 bytes that a dense 16-bit layer keeps per ``b*s*h`` (flash attention), both norms' outputs
and the activation function's output make 12 (PipeOffload, section 4.3, counts dropout masks too).
Megatron's own selective recompute does the norms (``layernorm``) and grouped experts (``moe_act``);
here is how our flag asks for it, and the same for every other MLP, which Megatron lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arguments import MegatronArgs
from ..callbacks import Callback
from ..feature import Feature, Flag, Run
from ..hooks import hooked
from ..targets import CHECKPOINT_INIT, MLP_FORWARD

logger = logging.getLogger(__name__)

FLAG = "--pp-cheap-recompute"


class Recompute(Feature):
    """``--pp-cheap-recompute``."""

    flags = (
        Flag(
            FLAG,
            "recompute norm and activation-function outputs in backward instead of keeping them, "
            "beside what --recompute-modules names",
            switch=True,
            not_in_library="it sets Megatron's arguments; set recompute_granularity='selective' "
            "and recompute_modules=['layernorm'] in the model's configuration",
        ),
    )

    def check(self, run: Run) -> None:
        if run.args.pp_cheap_recompute:
            ask_megatron(run.args)

    # Inside MoE layers' experts, too. Those of ours, in chunks, have passes of their own that
    # Megatron's recomputation refuses to run in; ``--moe-memory-reuse`` is for them.
    _experts = True

    def start(self, run: Run) -> Sequence[Callback]:
        self._experts = not run.experts_in_chunks
        return (self,) if run.args.pp_cheap_recompute else ()

    @hooked(MLP_FORWARD, "the activation function's output would be kept")
    def _mlp_forward(
        self,
        original: Callable[..., Any],
        mlp: Any,
        hidden_states: torch.Tensor,
        per_token_scale: Any = None,
        **kwargs: Any,
    ) -> Any:
        # Only an expert's output is scaled by its router's probabilities.
        kept = per_token_scale is not None and not self._experts
        if kept or not _pays(mlp, per_token_scale):
            return original(mlp, hidden_states, per_token_scale, **kwargs)
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

        if mlp.config.fp8 or mlp.config.fp4:
            from megatron.core.extensions.transformer_engine import set_save_original_input

            # It would keep a quantised copy, and discarding the original would free nothing.
            set_save_original_input(mlp.linear_fc2)

        def activation(x: torch.Tensor, bias: Any, scale: Any) -> torch.Tensor:
            between: torch.Tensor = original(_Between(mlp, bias), x, scale)[0]
            return between

        x, bias = mlp.linear_fc1(hidden_states)
        recompute = CheckpointWithoutOutput()
        y, output_bias = mlp.linear_fc2(recompute.checkpoint(activation, x, bias, per_token_scale))
        # The gradient of y comes before fc2's backward, which is the first to need its input. That
        # input is never discarded again, so a W pass finds it too, however late.
        recompute.discard_output_and_register_recompute(y)
        return y, output_bias

    @hooked(
        CHECKPOINT_INIT,
        "recompute would ask Transformer Engine, which is missing, for its FP8 state",
        when=lambda self: not _has_transformer_engine(),
    )
    def _without_fp8(
        self,
        original: Callable[..., None],
        checkpoint: Any,
        fp8: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Megatron tests for None, but its own default is False, which so means True.
        original(checkpoint, fp8 or None, *args, **kwargs)


def ask_megatron(args: MegatronArgs) -> None:
    """Turn on Megatron's part, beside what the user recomputes; call before its validation.

    Args:
        args: Megatron's arguments; ``recompute_granularity`` and ``recompute_modules`` are set.
    """
    modules = args.recompute_modules
    if modules is None:
        # What Megatron would take for itself, which --recompute-activations stands for.
        selective = args.recompute_activations or args.recompute_granularity == "selective"
        modules = ["core_attn"] if selective else []
    grouped = args.num_experts and args.moe_grouped_gemm
    # Within "moe" the whole layer is recomputed, and its activation function with it.
    wanted = ["layernorm", *(["moe_act"] if grouped and "moe" not in modules else [])]
    if args.recompute_granularity == "full" and args.rank == 0:
        logger.info(
            "%s recomputes parts of layers; --recompute-granularity full has no effect", FLAG
        )
    args.recompute_granularity = "selective"
    args.recompute_modules = [*modules, *(name for name in wanted if name not in modules)]
    if args.transformer_impl == "transformer_engine" and args.rank == 0:
        logger.info(
            "%s: where Transformer Engine has norm and linear layer in one module, "
            "it keeps the norm's output; norms that are modules of their own are recomputed",
            FLAG,
        )


def _has_transformer_engine() -> bool:
    from megatron.core.tensor_parallel import random

    return bool(random.HAVE_TE)


def _pays(mlp: Any, per_token_scale: Any) -> bool:
    """True if the activation's output would be kept from here until backward."""
    if not (mlp.training and torch.is_grad_enabled()):
        return False
    # In the backward of something that is recomputed as a whole, the output is needed at once.
    if torch._C._current_graph_task_id() != -1:
        return False
    # Megatron would add such an expert's second bias after fc2, which is not ours to repeat.
    return per_token_scale is None or not mlp.config.add_bias_linear


class _Between:
    """An MLP whose linear layers pass on what they get: what lies between them remains.

    Through it Megatron's own code runs the activation function, whatever kind and fusion.
    """

    def __init__(self, mlp: Any, bias: Any) -> None:
        self._mlp = mlp
        self.linear_fc1, self.linear_fc2 = _Pass(bias), _Pass(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mlp, name)


class _Pass(torch.nn.Module):
    """A linear layer's result without the layer: its input, and the bias to add."""

    def __init__(self, bias: Any) -> None:
        super().__init__()
        # Not as a parameter of this module.
        self._given = (bias,)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The input as it is."""
        return x, *self._given
