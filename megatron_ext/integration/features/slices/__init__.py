"""``--pp-slices``: every microbatch runs as slices of its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from ....schedule.spec import Cut
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Conflict, Feature, Flag, Run, require_no_conflict

FLAG, CUT = "--pp-slices", "--pp-slice-cut"
_CUTS = ("balanced", "even")
_WHOLE = "it takes whole microbatches; drop it"
_STATISTICS = "its statistics are of whole microbatches; drop it"


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
    conflicts = (
        Conflict("--num-experts", _STATISTICS),
        Conflict("--transformer-impl", "its attention is not cut; use local or transformer_engine",
                 off=("local", "transformer_engine")),
        Conflict("--use-legacy-models", "its attention is not cut; drop it"),
        Conflict("--experimental-attention-variant", "it is not cut; drop it"),
        Conflict("--mtp-num-layers", "it looks at the tokens behind a slice; drop it"),
        Conflict("--context-parallel-size", "it cuts sequences, too; drop it", off=(1,)),
        Conflict("--sliding-window-size", "its mask is not cut; drop it"),
        Conflict("--window-size", "its mask is not cut; drop it"),
        Conflict("--reset-attention-mask", "documents are not cut; drop it"),
        Conflict("--sft", "packed documents are not cut; drop it"),
        Conflict("--use-packed-sequences", "packed documents are not cut; drop it"),
        Conflict("--variable-seq-lengths", "all sequences are cut alike; drop it"),
        Conflict("--hybrid-layer-pattern", "recurrent layers have no slices; drop it"),
        Conflict("--hybrid-override-pattern", "recurrent layers have no slices; drop it"),
        Conflict("--fp8-format", "its attention takes whole sequences; drop it"),
        Conflict("--cuda-graph-impl", "a captured layer has one length; drop it", off=("none",)),
        Conflict("--enable-cuda-graph", "a captured layer has one length; drop it"),
        Conflict("--external-cuda-graph", "a captured layer has one length; drop it"),
        Conflict("--overlap-moe-expert-parallel-comm", _WHOLE),
        Conflict("--check-for-spiky-loss", "it would compare losses of slices; drop it"),
        Conflict("--apply-rope-fusion", "the fused kernel's positions begin at 0; drop it",
                 beside="--multi-latent-attention"),
        Conflict("--pp-offload", _WHOLE, off=("off",)),
        Conflict("--pp-offload-chunks", _WHOLE),
        Conflict("--pp-vocab-parallel", _WHOLE),
        Conflict("--pp-post-validation", _WHOLE),
        Conflict("--pp-profile", "its times are of whole microbatches; drop it"),
        Conflict("--pp-profile-steps", "its times are of whole microbatches; drop it"),
    )  # fmt: skip

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
    # Of a layer with 12 h^2 weights, causal: 2 h s of 24 h^2 + 2 h s operations a token.
    attention = Fraction(tokens, 12 * hidden + tokens)
    multiple = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    try:
        return Cut.of(tokens, count, attention, multiple, even)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {count}: {error}; give fewer slices") from None
