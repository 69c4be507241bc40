"""``--pp-slices``: every microbatch runs as slices of its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....plan.slices import CONFLICTS, FLAG, attention_share
from ....schedule.spec import Cut
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Flag, Run, require_no_conflict

CUT = "--pp-slice-cut"
_CUTS = ("balanced", "even")


class Slices(Feature):
    """On with ``--pp-slices`` of 2 or more."""

    flags = (
        Flag(
            FLAG,
            "cut the sequence of every training microbatch into K slices (default 1), for few "
            "microbatches and long sequences: a slice attends to those before it",
            "K",
            int,
            not_in_library="what a trainer's loss function reports is not added over slices; start "
            "the run with the launcher, or drop it",
        ),
        Flag(
            CUT,
            f"with {FLAG}: balanced (default), so that all slices take equally long under causal "
            "attention, or even, of equal lengths",
            "{balanced,even}",
            not_in_library=f"it is for {FLAG}; drop it",
        ),
    )
    conflicts = CONFLICTS

    def check(self, run: Run) -> None:
        args, request = run.args, run.request
        count, cut = args.pp_slices, args.pp_slice_cut
        if cut is not None and cut not in _CUTS:
            raise ConfigError(f"{CUT} must be one of {', '.join(_CUTS)}, got {cut!r}")
        if count is None or count == 1:
            if cut is not None:
                raise ConfigError(f"{CUT} {cut} is for {FLAG} of 2 or more; give both")
            return
        if count < 1:
            raise ConfigError(f"{FLAG} must be 1 or more, got {count}")
        if request is None:
            return
        require_no_conflict(args, self.conflicts, {"": f"{FLAG} {count}"})
        if request.file is not None:
            raise ConfigError(f"{FLAG} {count}: the order in {request.name} is fixed; drop it")
        if request.cap_bytes is not None:
            raise ConfigError(
                f"{FLAG} {count} takes a --pp-memory-cap as a fraction of 1F1B's peak, such as "
                "0.5, not in bytes"
            )
        run.request = replace(request, cut=_cut(args, count, cut == "even"))

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or run.request.cut is None:
            return ()
        from .run import SlicedPasses

        return (SlicedPasses(run.request.cut, run.args.transformer_impl),)


def _cut(args: MegatronArgs, count: int, even: bool) -> Cut:
    tokens, hidden = args.seq_length, args.hidden_size
    if tokens is None or hidden is None:
        raise ConfigError(f"{FLAG} {count} needs --seq-length and --hidden-size")
    attention = attention_share(tokens, hidden)
    multiple = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    try:
        return Cut.of(tokens, count, attention, multiple, even)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {count}: {error}; give fewer slices") from None
