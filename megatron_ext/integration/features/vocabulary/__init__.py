"""``--pp-vocab-parallel``: embedding and output layer in equal parts on all ranks of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....plan.refusals import VOCABULARY
from ...arguments import MegatronArgs
from ...callbacks import Callback, Step
from ...feature import Feature, Flag, Needs, Run, require_no_conflict
from ...gradients import gradient_hook, require_gradient_hooks
from ...hooks import Hook
from ...layout import require_prediction_last
from ...model_classes import NO_TEXT
from ...utils import LastModels
from .ends import FLAG, HOOKED, require_no_hooks
from .model import RULES, SharedOut, require_divisible, require_losses_of
from .passes import ONE_SHAPE, runner_of

_CHUNKS = "--pp-vocab-chunks"


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
        Flag(
            _CHUNKS,
            f"with {FLAG}: chunks of a microbatch's tokens whose logits exist at a time; with 1, "
            "the default, a rank keeps its part of the probabilities for the weight gradient, with "
            "more it computes them again",
            "N",
            int,
            least=1,
            needs=Needs({FLAG: ()}, FLAG),
        ),
    )
    conflicts = VOCABULARY
    rules = (*RULES, HOOKED, ONE_SHAPE, NO_TEXT)

    def check(self, run: Run) -> None:
        args, chunks = run.args, run.args.pp_vocab_chunks
        if run.request is None or not args.pp_vocab_parallel:
            return
        require_no_conflict(args, self.conflicts, {"": FLAG})
        layout = args.pipeline_model_parallel_layout
        if isinstance(layout, str):
            require_prediction_last(FLAG, layout)
        notice = _pad(args)
        run.notices += [] if notice is None else [notice]
        if getattr(args, "cross_entropy_loss_fusion", False):
            run.notices.append(
                f"{FLAG} computes the loss from parts of the logits on all ranks, "
                f"{chunks or 1} chunk{'s' * ((chunks or 1) > 1)} of tokens at a time; "
                "--cross-entropy-loss-fusion has no effect"
            )

    def check_derived(self, run: Run) -> None:
        # Megatron's arguments may have come from a checkpoint meanwhile.
        if run.request is not None and run.args.pp_vocab_parallel:
            _require_padded(run.args)

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.args.pp_vocab_parallel:
            return ()
        assert run.pipeline is not None
        self._run, self.vee = run, run.request.vee
        self._chunks = run.args.pp_vocab_chunks or 1
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
        step.runner_type = runner_of(step, self._chunks)

    def close(self) -> None:
        self._checked = LastModels()


def _require_padded(args: MegatronArgs) -> bool:
    """True if the padded size of the vocabulary is known; it must suit all ranks."""
    padded = getattr(args, "padded_vocab_size", None)  # a tokenizer may yet determine it
    if padded is None:
        return False
    require_divisible(padded, args.pipeline_model_parallel_size, args.tensor_model_parallel_size)
    return True


def _pad(args: MegatronArgs) -> str | None:
    """Let Megatron pad the vocabulary to a multiple of all ranks; returns what to log, if anything.

    Raises:
        ConfigError: it has a size already, and that is no such multiple.
    """
    if _require_padded(args):
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
