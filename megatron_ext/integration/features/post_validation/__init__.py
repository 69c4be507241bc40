"""``--pp-post-validation``: the optimizer steps before the gradient norm of all ranks is known."""

from __future__ import annotations

from collections.abc import Sequence

from ...callbacks import Callback
from ...feature import Conflict, Feature, Flag, Run, require_no_conflict

# Iterations; gradients that had to be clipped once will soon be again.
PATIENCE = 10
_FLAG = "--pp-post-validation"

_AHEAD = "the next iteration has begun when Megatron comes to it; drop it"
_HOOKED = "the first passes of an iteration run before Megatron prepares for them; drop it"
_STATE = "its state is not known to be restored exactly; drop it"


class PostValidation(Feature):
    """On with ``--pp-post-validation``."""

    flags = (
        Flag(
            _FLAG,
            "step the optimizer and begin the next iteration before the gradient norm of all "
            "pipeline ranks is known, and roll back if it requires clipping; used after N "
            f"iterations in a row without clipping (default {PATIENCE})",
            "N",
            int,
            const=PATIENCE,
            least=0,
            not_in_library="it steps the optimizer in the place of Megatron's own training loop; "
            "start the run with the launcher, or drop it",
        ),
    )
    conflicts = (
        Conflict(
            "--rerun-mode",
            "the rerun machinery agrees over all ranks at the end of every iteration, which is "
            "what post-validation removes; add --rerun-mode disabled",
            off=("disabled",),
        ),
        Conflict(
            "--optimizer",
            "only the steps of adam and sgd are known to be restored exactly; use one of them",
            off=("adam", "sgd"),
        ),
        Conflict("--optimizer-cpu-offload", _STATE),
        Conflict("--use-precision-aware-optimizer", _STATE),
        Conflict(
            "--optimizer-cuda-graph", "it is captured with Megatron's reductions in it; drop it"
        ),
        Conflict("--use-layer-wise-distributed-optimizer", _STATE),
        Conflict("--fp8-format", "scaling factors change with every forward pass; drop it"),
        Conflict("--fp4-format", "scaling factors change with every forward pass; drop it"),
        Conflict("--num-distributed-optimizer-instances", _STATE, off=(1,)),
        Conflict(
            "--mtp-num-layers", "its gradients may be clipped by a norm of their own; drop it"
        ),
        Conflict("--qk-clip", "it changes parameters behind the optimizer; drop it"),
        Conflict("--log-max-attention-logit", _AHEAD),
        Conflict("--save-activations-interval", _HOOKED),
        Conflict("--save-tokens-per-expert-interval", _HOOKED),
        Conflict("--save-dgrads-interval", _HOOKED),
        Conflict("--moe-routing-trace-path", _HOOKED),
        Conflict("--dsa-indexer-loss-coeff", "its loss would be logged too early; drop it"),
        Conflict(
            "--dataloader-type",
            "a loader of your own may save how far it has been read; use single or cyclic",
            off=("single", "cyclic"),
        ),
    )

    def check(self, run: Run) -> None:
        if run.args.pp_post_validation is None or run.request is None:
            return
        require_no_conflict(run.args, self.conflicts, {"": _FLAG})

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or run.args.pp_post_validation is None:
            return ()
        from .head import Head
        from .setup import StepAhead

        assert run.pipeline is not None
        head = Head(run.pipeline)
        return (head, StepAhead(head, run.args.pp_post_validation))
