"""Checkpoints that any schedule loads, whatever schedule saved them.

``torch_dist`` names model parameters globally, so these always fit. Two things do not by
themselves: the distributed optimizer's default format follows the parameter layout of the rank that
saved it, and Megatron accepts a checkpoint that holds other parameters than the model. The first
gets the reshardable format when saving, and one sentence when loading a checkpoint that lacks it;
the second is compared by name and shape before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...._input import shown
from ....checkpoints.layout import Layout
from ...arguments import MegatronArgs
from ...callbacks import Callback
from ...errors import ConfigError
from ...feature import Feature, Run
from ...hooks import hooked
from ...layout import LayerPattern
from ...targets import LOAD, LOAD_BASE, SAVE
from ...utils import chunks_of, gather, tied_embeddings, unwrapped
from . import integrity, metadata

logger = logging.getLogger(__name__)

# What --dist-ckpt-strictness calls a parameter that the checkpoint lacks is accepted by these.
_LENIENT = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
# Flags that change which parameters a model has: shown where a checkpoint's differ.
_MODEL_FLAGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "mtp_num_layers",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "padded_vocab_size",
    "transformer_impl",
)
_SHOWN = 4


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
    if vee and by_rank and (args.save or loads):
        raise ConfigError(
            f"--pp-schedule {name} does not support --ckpt-format torch: its files number layers "
            "by rank and chunk, so V placement would exchange layers silently; use --ckpt-format "
            "torch_dist"
        )
    # Before core_v0.18 Megatron lacks the second.
    distributed = args.use_distributed_optimizer or getattr(
        args, "use_layer_wise_distributed_optimizer", False
    )
    if (
        not args.save
        or not distributed
        or args.ckpt_format != "torch_dist"
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
        self._chunks, self._found = [unwrapped(m) for m in chunks_of(ddp_model)], None
        try:
            result = original(ddp_model, *args, **kwargs)
            if self._layout.placement == "vee":
                _require_equal_copies(self._chunks)
            return result
        finally:
            self._chunks = self._found = None
            self._metadata = {}

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

    def _require_placement(self, folder: Any) -> None:
        if self._layout.placement == "vee":
            raise ConfigError(
                f"--pp-schedule {self._name} cannot load {folder}, which is in the format torch: "
                "its files number layers by rank and chunk, not as a V does; load it without "
                "--pp-schedule (--auto-detect-ckpt-format) and save it with --ckpt-format "
                "torch_dist"
            )

    def _require_own_files(self, state: Mapping[str, Any], folder: Any) -> None:
        """A checkpoint with one file a rank must be of this very layout, and complete."""
        self._require_placement(folder)
        saved = state.get("args")
        if saved is not None and _saved_layout(saved) != self._layout:
            raise ConfigError(
                f"--pp-schedule {self._name} cannot load {folder}: files in the format torch fit "
                f"only the layout that saved them ({_saved_layout(saved)}), and this run has "
                f"{self._layout}; save it with --ckpt-format torch_dist instead"
            )
        assert self._chunks is not None
        lacking = []
        for entry, chunk in zip(_entries(len(self._chunks)), self._chunks):
            held = state.get(entry, {})
            lacking += [
                f"{name} of chunk {entry}"
                for name, parameter in chunk.named_parameters()
                if name not in held or held[name].shape != parameter.shape
            ]
        if lacking:
            raise ConfigError(
                f"{folder} does not hold {len(lacking)} of the parameters of this rank "
                f"({_some(lacking)}), which would keep random initial values; give the model's "
                "flags as they were when it was saved"
            )

    def _require_optimizer(
        self, args: MegatronArgs, state: Mapping[str, Any], folder: str, release: bool, kind: str
    ) -> None:
        """Refuse an optimizer state whose format is tied to another layout."""
        from megatron.core.dist_checkpointing import load_content_metadata
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        saved = state.get("args")
        if saved is None:
            return
        theirs = _saved_layout(saved)
        if kind == "LOCAL" and theirs != self._layout:
            raise ConfigError(
                f"--pp-schedule {self._name} cannot load the local checkpoint {folder}: it was "
                f"saved with {theirs}, this run has {self._layout}, and local checkpoints fit only "
                "the layout that saved them; load a global one"
            )
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
        if not fits and theirs != self._layout:
            raise ConfigError(
                f"--pp-schedule {self._name} cannot load the optimizer state of {folder}: its "
                f"format ({sharding}) fits only the layout that saved it ({theirs}), and this run "
                f"has {self._layout}; save it again in the layout it has with "
                "--dist-ckpt-optim-fully-reshardable, or add --no-load-optim to start with a fresh "
                "optimizer"
            )

    def _require_same_parameters(self, args: MegatronArgs, wanted: Mapping[str, Any]) -> None:
        """Compare the model's parameters, over the whole pipeline, with those in the checkpoint."""
        from megatron.core import parallel_state

        assert self._chunks is not None and self._found is not None
        state, folder = self._found
        names = [name for name in _entries(len(self._chunks)) if name in wanted]
        requested: dict[str, tuple[tuple[int, ...], bool]] = {}
        for name in names:
            requested.update(_shapes(wanted[name]))
        group = parallel_state.get_pipeline_model_parallel_group()
        every = gather((requested, self._uncovered(wanted)), group)
        uncovered = [name for _, names in every for name in names]
        model = {key: shape for shapes, _ in every for key, shape in shapes.items()}
        held = _shapes_on_disk(folder, self._metadata.get(folder))
        absent = sorted(set(model) - set(held))
        other = sorted(
            key
            for key in set(model) & set(held)
            if model[key][0] != held[key] and not model[key][1]
        )
        extra = sorted(set(held) - set(model))
        differing = _differing_flags(args, state.get("args"))
        if uncovered:
            raise ConfigError(
                f"Megatron's sharded state leaves out {len(uncovered)} of the model's parameters "
                f"({_some(uncovered)}), so {folder} cannot fill them; please report this model"
            )
        if other:
            raise ConfigError(
                f"{folder} does not fit the model: {_shapes_of(other, held, model)}; "
                f"{differing or 'give the flags that it was saved with'}"
            )
        grown = sorted(k for k in set(model) & set(held) if model[k][0][:1] > held[k][:1])
        if grown and args.rank == 0:
            logger.warning(
                "%s has fewer rows than the model: %s; the others keep random "
                "initial values, which is right only if they are padding of the vocabulary",
                folder,
                _shapes_of(grown, held, model),
            )
        self._report_difference(args, folder, absent, extra, differing)

    def _report_difference(
        self, args: MegatronArgs, folder: str, absent: list[str], extra: list[str], differing: str
    ) -> None:
        """Parameters on one side only: refused, or logged where the user's flags accept it."""
        lacking = (
            f"{folder} does not hold {len(absent)} of the model's parameters ({_some(absent)})"
        )
        unused = f"{folder} holds {len(extra)} parameters that the model lacks ({_some(extra)})"
        hint = differing or "give the model's flags as they were when it was saved"
        if absent and args.dist_ckpt_strictness not in _LENIENT:
            raise ConfigError(
                f"{lacking}, which would keep random initial values; {hint}, or accept that with "
                "--dist-ckpt-strictness log_all"
            )
        if extra and not (args.finetune or args.dist_ckpt_strictness in _LENIENT):
            raise ConfigError(
                f"{unused}, so this would be another model; {hint}, or accept that with --finetune "
                "or --dist-ckpt-strictness log_all"
            )
        if args.rank == 0 and absent:
            logger.warning("%s; they keep random initial values", lacking)
        if args.rank == 0 and extra:
            logger.warning("%s; they are left out", unused)

    def _uncovered(self, wanted: Mapping[str, Any]) -> list[str]:
        """Parameters of this rank's chunks that nothing in ``wanted`` will fill."""
        assert self._chunks is not None
        return [
            f"{name} of chunk {entry}"
            for entry, chunk in zip(_entries(len(self._chunks)), self._chunks)
            # A distillation model hides its own loss modules while the state is made.
            if not hasattr(chunk, "hide_loss_modules")
            for name, _ in chunk.named_parameters()
            if name not in wanted.get(entry, {})
        ]


def _saved_layout(args: object) -> Layout:
    try:
        return Layout.of(args)
    except ValueError as error:
        raise ConfigError(f"the checkpoint's saved arguments are damaged: {error}") from None


def _entries(chunks: int) -> list[str]:
    """Megatron's names of the model's parts in a state dict."""
    return ["model"] if chunks == 1 else [f"model{i}" for i in range(chunks)]


def _shapes(part: Any) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Global shape of each tensor in a sharded state, by global name, and if it may differ."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    found = {}
    for value in nested_values(part):
        # A factory stands for tensors that are saved in another form, e.g. two halves.
        built = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for tensor in built:
            if isinstance(tensor, ShardedTensor):
                shape = tuple(int(n) for n in tensor.global_shape)
                found[str(tensor.key)] = (shape, bool(tensor.allow_shape_mismatch))
    return found


def _shapes_on_disk(folder: str, known: Any) -> dict[str, tuple[int, ...]]:
    """Global shapes of the model's tensors in a checkpoint; read by one rank for all.

    Args:
        folder: the iteration's.
        known: the metadata of that folder, where this rank has it already.

    Raises:
        ConfigError: it cannot be read.
    """

    def read() -> dict[str, tuple[int, ...]]:
        try:
            found = metadata.read(folder) if known is None else known
            return metadata.model_shapes(found)
        except ValueError as error:
            raise ValueError(
                f"cannot read the metadata of the checkpoint {folder}: {error}"
            ) from None

    return integrity.from_rank_0(read)


def _shapes_of(
    keys: list[str],
    held: Mapping[str, tuple[int, ...]],
    model: Mapping[str, tuple[tuple[int, ...], bool]],
) -> str:
    return _some(f"{key} is {held[key]} there and {model[key][0]} here" for key in keys)


def _differing_flags(args: MegatronArgs, saved: Any) -> str:
    """The model's flags that a checkpoint was saved with and this run has not."""
    values = [
        f"--{name.replace('_', '-')} {shown(getattr(saved, name))} "
        f"(here {shown(getattr(args, name, None))})"
        for name in _MODEL_FLAGS
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name, None)
    ]
    here, there = LayerPattern.of(args), LayerPattern.of(saved)
    texts = [None if p is None else p.text.replace("|", "") for p in (here, there)]
    if texts[0] != texts[1] and there is not None:
        values.append(f"{there.flag} {texts[1]} (here {texts[0]})")
    return f"it was saved with {', '.join(values)}" if values else ""


def _require_equal_copies(chunks: list[Any]) -> None:
    """Under V placement rank 0 has the word embeddings twice: both must have been loaded."""
    import torch
    from megatron.core import parallel_state

    found = tied_embeddings(parallel_state.get_pipeline_model_parallel_rank(), chunks)
    if found is not None and not torch.equal(*found):
        raise RuntimeError(
            "the two copies of the word embeddings differ after loading; please report this"
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
