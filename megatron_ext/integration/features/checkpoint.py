"""Checkpoints that any schedule loads, whatever schedule saved them.

``torch_dist`` names model parameters globally, so these always fit. The distributed optimizer's
default format follows the parameter layout of the rank that saved it, so runs with a schedule save
in the reshardable one. Files by rank cannot hold a V.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..arguments import MegatronArgs
from ..callbacks import Callback
from ..feature import Feature, Run
from ..hooks import bound, hooked
from ..support import BY_RANK, require
from ..targets import LOAD_BASE, RESHARDABLE_STATE, TRAIN
from ..utils import chunks_of, unwrapped


def choose_formats(args: MegatronArgs) -> str | None:
    """Before Megatron's validation: the formats that a run under ``--pp-schedule`` saves in.

    Args:
        args: Megatron's arguments; the reshardable optimizer format is switched on in them.

    Returns:
        What rank 0 should log, if anything.
    """
    converts = args.ckpt_convert_format
    distributed = args.use_distributed_optimizer or getattr(
        args, "use_layer_wise_distributed_optimizer", False
    )
    if (
        not (args.save or converts)
        or not distributed
        or (converts or args.ckpt_format) != "torch_dist"
        or args.no_save_optim
        or args.dist_ckpt_optim_fully_reshardable
    ):
        return None
    if args.non_persistent_ckpt_type == "local":
        return (
            "--non-persistent-ckpt-type local cannot save the distributed optimizer "
            "in its reshardable format, so these checkpoints continue only with the same schedule "
            "placement and parallel sizes"
        )
    args.dist_ckpt_optim_fully_reshardable = True
    return (
        "the distributed optimizer is saved as with "
        "--dist-ckpt-optim-fully-reshardable, so that every schedule and pipeline size can load it"
    )


class Checkpoint(Feature):
    """On for every schedule inside Megatron's training loop."""

    def check(self, run: Run) -> None:
        if run.request is not None and not run.library:
            notice = choose_formats(run.args)
            run.notices += [] if notice is None else [notice]

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.training:
            return ()
        self._vee, self._saves = run.request.vee, bool(run.args.save)
        return (self,)

    @hooked(
        TRAIN,
        "a state that cannot be saved would end the run at its first checkpoint",
        when=lambda self: self._saves,
    )
    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Describe the model as a checkpoint would, once, before its first step."""
        for model in chunks_of(bound(original, *args, **kwargs).arguments["model"]):
            unwrapped(model).sharded_state_dict()
        return original(*args, **kwargs)

    @hooked(
        LOAD_BASE,
        "files by rank would put layers in the wrong places of a V",
        when=lambda self: self._vee,
    )
    def _load_base_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        state, _, _, kind = result
        require(BY_RANK, state is None or kind.name != "LEGACY")
        return result

    # Before core_v0.20 Megatron packs buckets without the padding at their ends, and then looks for
    # parameters where they are with it. With no padding to leave out, both are the same.
    @hooked(RESHARDABLE_STATE, "optimizer states behind a bucket with padding would be shifted")
    def _sharded_param_state(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with contextlib.ExitStack() as undo:
            for buffer in optimizer.buffers:
                sizes = [(buffer, buffer.numel)]
                sizes += [(bucket, bucket.grad_data.numel()) for bucket in buffer.buckets]
                for held, numel in sizes:
                    undo.callback(setattr, held, "numel_unpadded", held.numel_unpadded)
                    held.numel_unpadded = numel
            return original(optimizer, *args, **kwargs)
