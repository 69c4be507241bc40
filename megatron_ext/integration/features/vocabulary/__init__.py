"""``--pp-vocab-parallel``: embedding and output layer in equal parts on all ranks of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...arguments import MegatronArgs
from ...callbacks import Callback, Step
from ...feature import Feature, Flag, Run
from ...gradients import gradient_hook, require_gradient_hooks
from ...hooks import Hook
from ...utils import LastModels
from .ends import FLAG, require_no_hooks
from .model import SharedOut, require_losses_of
from .passes import runner_of


class VocabularyParallel(SharedOut, Feature):
    """On with ``--pp-vocab-parallel``: runs the vocabulary's passes of every iteration."""

    flags = (
        Flag(
            FLAG,
            "give every pipeline rank an equal part of the embedding and the output layer, so that "
            "passes take equal time and memory",
            switch=True,
            not_in_library="trainers load and export weights by the names of whole matrices, which "
            "no rank has; start the run with the launcher, or drop it",
        ),
    )

    def check(self, run: Run) -> None:
        args = run.args
        if run.request is None or not args.pp_vocab_parallel:
            return
        notice = _pad(args)
        run.notices += [] if notice is None else [notice]
        if getattr(args, "cross_entropy_loss_fusion", False):
            run.notices.append(
                f"{FLAG} computes the loss from parts of the logits on all ranks; "
                "--cross-entropy-loss-fusion has no effect"
            )

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.args.pp_vocab_parallel:
            return ()
        self._run, self.vee = run, run.request.vee
        self._checked = LastModels()
        return (self,)

    def hooks(self) -> Sequence[Hook]:
        run = self._run
        assert run.request is not None
        found = [*super().hooks(), *(self.script_hooks() if run.training else ())]
        # A schedule that splits backward passes keeps Megatron's hook, too.
        return found if run.request.splits_backward else [*found, gradient_hook()]

    def begin(self, step: Step) -> None:
        models = step.call.iteration.models
        if not self._checked.are(models):
            require_gradient_hooks(models)
            self._checked.set(models)
        require_no_hooks(models)  # in every step: they cost microseconds, and hooks may come late
        require_losses_of(models)
        step.runner_type = runner_of(step)

    def close(self) -> None:
        self._checked = LastModels()


def _pad(args: MegatronArgs) -> str | None:
    """Let Megatron pad the vocabulary to a multiple of all ranks; returns what to log."""
    if getattr(args, "padded_vocab_size", None) is not None:
        return None
    pp, tp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    before = args.make_vocab_size_divisible_by
    args.make_vocab_size_divisible_by = after = math.lcm(before, pp)
    if after == before:
        return None
    return (
        f"{FLAG} pads the vocabulary to a multiple of {after * tp} entries, not of "
        f"{before * tp}, as with --make-vocab-size-divisible-by {after}"
    )
