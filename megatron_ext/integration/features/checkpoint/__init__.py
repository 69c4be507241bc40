"""Checkpoints that any schedule loads, whatever schedule saved them.

``torch_dist`` names model parameters globally, so these always fit. Two things do not by
themselves: the distributed optimizer's default format follows the parameter layout of the rank that
saved it, and Megatron accepts a checkpoint that holds other parameters than the model. The first
gets the reshardable format when saving, and one sentence when loading a checkpoint that lacks it;
the second is compared by name and shape before anything is loaded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....checkpoints.layout import Layout
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Run
from ...hooks import bound, hooked
from ...rules import Rule
from ...targets import LOAD, LOAD_BASE, RESHARDABLE_STATE, SAVE
from ...utils import chunks_of, device_of, gather, unwrapped
from . import integrity
from .optimizer import count_others
from .parameters import differing_flags, named, shapes, shapes_of, shapes_on_disk

logger = logging.getLogger(__name__)

# What --dist-ckpt-strictness calls a parameter that the checkpoint lacks is accepted by these.
_LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
BY_RANK = Rule(
    "--pp-schedule {schedule} does not support {what}",
    "files in the format torch number layers by rank and chunk, not as a V does",
    "{fix}",
)
SAME_LAYOUT = Rule("{what} is for {theirs}, whose layout saved it", "this run has {own}", "{fix}")
OWN_PARAMETERS = Rule(
    "the model needs all of its parameters from {folder}",
    "that does not hold {count} of them ({names}), which would keep random initial values",
    "{fix}",
)
OTHER_PARAMETERS = Rule(
    "{folder} is for another model",
    "{count} parameters in it are not in this one ({names})",
    "{fix}",
)
SAME_SHAPES = Rule("{folder} is for a model of other shapes", "here {shapes}", "{fix}")
COVERED = Rule(
    "the model needs all of its parameters in Megatron's sharded state",
    "that leaves out {count} ({names}), so {folder} cannot fill them",
    "please report this model",
)
SAME_WEIGHTS = Rule(
    "training needs an optimizer state of its own weights",
    "{folder} has one of other weights in {others} of {known} shards, as Megatron before 0.20 "
    "saves with --dist-ckpt-optim-fully-reshardable and padding between buckets",
    "add --no-load-optim to start with a fresh optimizer",
)
_AS_SAVED = "give the model's flags as they were when it was saved"


def choose_formats(args: MegatronArgs, name: str, vee: bool) -> str | None:
    """Before Megatron's validation: the formats that a run under ``--pp-schedule`` saves in.

    Args:
        args: Megatron's arguments; the reshardable optimizer format is switched on in them.
        name: the schedule, for the sentences.
        vee: it has V placement.

    Returns:
        What rank 0 should log, if anything.

    Raises:
        ConfigError: checkpoints by rank, whose format has no V placement.
    """
    by_rank = args.ckpt_format == "torch"
    loads = args.load and not args.auto_detect_ckpt_format
    kept = not (vee and by_rank and (args.save or loads))
    fix = "use --ckpt-format torch_dist"
    BY_RANK.require(kept, schedule=name, what="--ckpt-format torch", fix=fix)
    converts = args.ckpt_convert_format
    kept, what = not (vee and converts == "torch"), "--ckpt-convert-format torch"
    fix = "convert without --pp-schedule"
    BY_RANK.require(kept, schedule=name, what=what, fix=fix)
    # Before core_v0.18 Megatron lacks the second.
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

    rules = (
        *(BY_RANK, SAME_LAYOUT, OWN_PARAMETERS, OTHER_PARAMETERS, SAME_SHAPES, COVERED),
        SAME_WEIGHTS,
    )

    def check(self, run: Run) -> None:
        if run.request is not None and not run.library:
            notice = choose_formats(run.args, run.request.name, run.request.vee)
            run.notices += [] if notice is None else [notice]

    def start(self, run: Run) -> Sequence[Callback]:
        if run.request is None or not run.training:
            return ()
        self._name, self._layout = run.request.name, Layout.of(run.args)
        self._chunks: list[Any] | None = None
        self._found: tuple[dict[str, Any], str] | None = None
        self._metadata: dict[str, Any] = {}
        return (self,)

    @hooked(LOAD, "parameters that a checkpoint lacks would keep random initial values")
    def _load_checkpoint(
        self, original: Callable[..., Any], ddp_model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from megatron.training import get_args

        self._chunks, self._found = [unwrapped(m) for m in chunks_of(ddp_model)], None
        try:
            result = original(ddp_model, *args, **kwargs)
        finally:
            self._chunks = self._found = None
            self._metadata = {}
        given = bound(original, ddp_model, *args, **kwargs).arguments
        folder = getattr(get_args(), given.get("load_arg", "load"), None)
        if folder is not None and given["optimizer"] is not None:
            others, known = count_others(given["optimizer"], device_of(chunks_of(ddp_model)))
            SAME_WEIGHTS.require(not others, folder=folder, others=others, known=known)
        return result

    @hooked(LOAD_BASE, "an optimizer state of another layout would end in a shape exception")
    def _load_base_checkpoint(
        self,
        original: Callable[..., Any],
        load_dir: Any,
        args: MegatronArgs,
        rank0: bool = False,
        sharded_state_dict: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        def load() -> Any:
            return original(load_dir, args, rank0, sharded_state_dict, *rest, **kwargs)

        if self._chunks is None:  # only the arguments are read
            return load()
        if rank0:
            self._metadata = integrity.require_complete(load_dir, args)
        if not rank0 and sharded_state_dict is not None and self._found is not None:
            self._require_same_parameters(args, sharded_state_dict)
        result = load()
        state, folder, release, kind = result
        if state is None:
            return result
        kind = kind.name
        if kind == "LEGACY":
            if rank0:
                self._require_placement(folder)
            else:
                self._require_own_files(state, folder)
        elif rank0 and kind in ("GLOBAL", "LOCAL"):
            self._require_optimizer(args, state, str(folder), release, kind)
            if kind == "GLOBAL":
                self._found = (state, str(folder))
        return result

    @hooked(SAVE, "a failed save would not report what a restart will load")
    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return integrity.report_failure(original, *args, **kwargs)

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

    def _require_placement(self, folder: Any) -> None:
        fix = (
            "load it without --pp-schedule (--auto-detect-ckpt-format) and save it with "
            "--ckpt-format torch_dist"
        )
        kept = self._layout.placement != "vee"
        BY_RANK.require(kept, schedule=self._name, what=f"loading {folder}", fix=fix)

    def _require_layout(self, saved: Any, what: str, fix: str) -> None:
        """What a checkpoint holds in a form that is tied to the layout that saved it."""
        theirs = _saved_layout(saved)
        kept = theirs == self._layout
        SAME_LAYOUT.require(kept, what=what, theirs=theirs, own=self._layout, fix=fix)

    def _require_own_files(self, state: Mapping[str, Any], folder: Any) -> None:
        """A checkpoint with one file a rank must be of this very layout, and complete."""
        self._require_placement(folder)
        saved = state.get("args")
        if saved is not None:
            fix = "save it with --ckpt-format torch_dist instead"
            self._require_layout(saved, f"{folder} in the format torch", fix)
        lacking = self._missing(state, lambda held, own: held.shape == own.shape)
        OWN_PARAMETERS.require(not lacking, folder=folder, **named(lacking), fix=_AS_SAVED)

    def _require_optimizer(
        self, args: MegatronArgs, state: Mapping[str, Any], folder: str, release: bool, kind: str
    ) -> None:
        """Refuse an optimizer state whose format is tied to another layout."""
        from megatron.core.dist_checkpointing import load_content_metadata
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        saved = state.get("args")
        if saved is None:
            return
        if kind == "LOCAL":
            self._require_layout(saved, f"the local checkpoint {folder}", "load a global one")
        skipped = (
            release or args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", False)
        )
        if skipped or not args.use_distributed_optimizer or kind == "LOCAL":
            return
        metadata = load_content_metadata(preloaded_state_dict=dict(state)) or {}
        # Checkpoints from before Megatron recorded it: what it concludes itself.
        parallel = getattr(saved, "ckpt_fully_parallel_save", False)
        old = "fully_sharded_model_space" if parallel else "dp_zero_gather_scatter"
        sharding = metadata.get("distrib_optim_sharding_type", old)
        fits = sharding in DistributedOptimizer.checkpoint_fully_reshardable_formats
        if not fits:
            fix = (
                "save it again in the layout it has with --dist-ckpt-optim-fully-reshardable, or "
                "add --no-load-optim to start with a fresh optimizer"
            )
            self._require_layout(saved, f"the optimizer state ({sharding}) of {folder}", fix)

    def _require_same_parameters(self, args: MegatronArgs, wanted: Mapping[str, Any]) -> None:
        """Compare the model's parameters, over the whole pipeline, with those in the checkpoint."""
        from megatron.core import parallel_state

        assert self._chunks is not None and self._found is not None
        state, folder = self._found
        names = [name for name in _entries(len(self._chunks)) if name in wanted]
        requested: dict[str, tuple[tuple[int, ...], bool]] = {}
        for name in names:
            requested.update(shapes(wanted[name]))
        group = parallel_state.get_pipeline_model_parallel_group()
        every = gather((requested, self._missing(wanted)), group)
        uncovered = [name for _, names in every for name in names]
        model = {key: shape for shapes, _ in every for key, shape in shapes.items()}
        held = shapes_on_disk(folder, self._metadata.get(folder))
        absent = sorted(set(model) - set(held))
        other = sorted(
            key
            for key in set(model) & set(held)
            if model[key][0] != held[key] and not model[key][1]
        )
        extra = sorted(set(held) - set(model))
        differing = differing_flags(args, state.get("args"))
        COVERED.require(not uncovered, folder=folder, **named(uncovered))
        differ = shapes_of(other, held, model)
        SAME_SHAPES.require(not other, folder=folder, shapes=differ, fix=differing or _AS_SAVED)
        grown = sorted(k for k in set(model) & set(held) if model[k][0][:1] > held[k][:1])
        if grown and args.rank == 0:
            logger.warning(
                "%s has fewer rows than the model: %s; the others keep random "
                "initial values, which is right only if they are padding of the vocabulary",
                folder,
                shapes_of(grown, held, model),
            )
        self._report_difference(args, folder, absent, extra, differing)

    def _report_difference(
        self, args: MegatronArgs, folder: str, absent: list[str], extra: list[str], differing: str
    ) -> None:
        """Parameters on one side only: refused, or logged where the user's flags accept it."""
        strict = args.dist_ckpt_strictness not in _LENIENT
        fix = f"{differing or _AS_SAVED}, or accept that with"
        lenient = "--dist-ckpt-strictness log_all"
        lacking = {"folder": folder, **named(absent)}
        OWN_PARAMETERS.require(not (absent and strict), **lacking, fix=f"{fix} {lenient}")
        unused = {"folder": folder, **named(extra)}
        kept = not extra or args.finetune or not strict
        OTHER_PARAMETERS.require(kept, **unused, fix=f"{fix} --finetune or {lenient}")
        if args.rank == 0 and absent:
            logger.warning(
                "%(folder)s does not hold %(count)d of the model's parameters (%(names)s); they "
                "keep random initial values",
                lacking,
            )
        if args.rank == 0 and extra:
            logger.warning(
                "%(folder)s holds %(count)d parameters that the model lacks (%(names)s); they are "
                "left out",
                unused,
            )

    def _missing(
        self, state: Mapping[str, Any], fits: Callable[[Any, Any], bool] = lambda held, own: True
    ) -> list[str]:
        """Parameters of this rank's chunks that nothing in ``state`` will fill."""
        assert self._chunks is not None
        return [
            f"{name} of chunk {entry}"
            for entry, chunk in zip(_entries(len(self._chunks)), self._chunks)
            # A distillation model hides its own loss modules while the state is made.
            if not hasattr(chunk, "hide_loss_modules")
            for name, own in chunk.named_parameters()
            if name not in state.get(entry, {}) or not fits(state[entry][name], own)
        ]


def _saved_layout(args: object) -> Layout:
    try:
        return Layout.of(args)
    except ValueError as error:
        raise ConfigError(f"the checkpoint's saved arguments are damaged: {error}") from None


def _entries(chunks: int) -> list[str]:
    """Megatron's names of the model's parts in a state dict."""
    return ["model"] if chunks == 1 else [f"model{i}" for i in range(chunks)]
