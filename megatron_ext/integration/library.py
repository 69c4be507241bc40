"""Facts from a model: schedules, offload and MoE chunks in a trainer of its own.

What a command line would contain is known only step by step: the options at once, the sizes of the
pipeline and of a model when that model comes to the forward-backward function for the first time.
So the hooks are bound at once, and schedule, plans and offload are settled model by model.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from .._log import set_up, tear_down
from ..runtime.watchdog import close_process_watchdog
from . import entry_point
from .callbacks import Callback
from .entry_point import EntryPoint
from .errors import ConfigError
from .feature import Feature, Run
from .flags import given, in_options, parsed
from .hooks import Report
from .pipeline import ScheduledPipeline, groups_of_call, pipeline_group
from .support import in_use, require_allowed
from .tested import untested
from .utils import chunks_of, device_of, nested, time_limit_minutes, unwrapped, watched

logger = logging.getLogger(__name__)

# Argument -> attribute of a model's configuration, where they differ.
_RENAMED = {"num_experts": "num_moe_experts"}
# Megatron's FSDP, by the first part of its classes' names: from core_v0.20 on there are two.
_FSDP = ("FullyShardedDataParallel", "MegatronFSDP")
_COSTS = "microbatch_costs"  # the option that may be a function


class Library(EntryPoint):
    """What ``megatron_ext.enable`` puts in force in a process.

    Args:
        options: as ``megatron_ext.enable``.
        entry: Megatron's own functions lead to ``forward_backward``.

    Raises:
        ConfigError: an option is unknown, or cannot work without Megatron's arguments.
    """

    def __init__(self, options: Mapping[str, object], entry: bool = True) -> None:
        super().__init__()
        function = options.get(_COSTS)
        if callable(function):
            options = {**options, _COSTS: "lengths"}
        self._options = vars(parsed(options))
        args: Any = SimpleNamespace(**self._options, rank=_rank())
        if not given(args):
            raise ConfigError("a trainer of your own needs --pp-schedule; give e.g. 'v-half'")
        run = Run(args, self.hooks.version, training=False, library=True)
        run.lengths_of = function if callable(function) else None
        self._run = self.checked(run)
        self._entry = entry and self._run.request is not None
        self._used = False
        self._shared: dict[Feature, Sequence[Callback]] = {}
        self._models: weakref.WeakSet[_OfModel] = weakref.WeakSet()

    def open(self) -> None:
        """Bind the hooks that all models share.

        Raises:
            ConfigError: one cannot be bound.
        """
        shared = [feature for feature in self.features if not feature.per_model]
        hooks = self.pipeline_hooks() if self._entry else []
        self._shared = self.begin(self._run, shared, hooks)

    def revert(self) -> None:
        atexit.unregister(self.warn_if_unused)
        with contextlib.ExitStack() as undo:
            undo.callback(super().revert)
            for of_model in list(self._models):
                undo.callback(of_model.close)

    def closing(self) -> Iterable[Callable[[], None]]:
        return (part.close for parts in self._shared.values() for part in parts)

    def forward_backward(self, **kwargs: Any) -> Any:
        """One call of the forward-backward function, for whichever model it is.

        Raises:
            ConfigError: the schedule or an option does not fit this model.
        """
        self._used = True
        with in_options():
            models = chunks_of(kwargs["model"])
            of_model = _OfModel.found(self, models[0])
            if of_model is None or of_model not in self._models:
                collection = kwargs.get("pg_collection")
                group = pipeline_group(kwargs.get("p2p_communicator"), collection)
                size = kwargs["seq_length"], kwargs["micro_batch_size"]
                with watched("for the ranks of its pipeline to prepare the model's first step"):
                    of_model = self._prepared(models, group, collection, size)
            return of_model.pipeline(**kwargs)

    def warn_if_unused(self) -> None:
        """Log that the schedule had no effect, if no pipeline call has come."""
        if not self._used and self._run.request is not None:
            logger.warning(
                "no forward-backward call came for schedule %s, which had no effect; "
                "the trainer must fetch its function by Megatron's get_forward_backward_func()",
                self._run.request.name,
            )

    def _prepared(
        self, models: list[Any], group: Any, collection: Any, size: tuple[int, int]
    ) -> _OfModel:
        """What is in force for a model that has not come before.

        Args:
            models: its chunks on this rank.
            group, collection: its pipeline, and the call's groups, if they are not Megatron's.
            size: tokens and samples of a microbatch.
        """
        from megatron.core.utils import get_model_config

        config = get_model_config(models[0])
        minutes = time_limit_minutes(group, device_of(models))
        args: Any = ModelArgs(self._options, models, config, group.size(), minutes, _rank(), *size)
        run = self._run.for_model(args, models, groups_of_call(group, collection, config))
        features = [type(f)() if f.per_model else f for f in self.features]
        for feature in features:
            feature.check(run)
        require_allowed(run.args, in_use(run))
        for notice in untested(run) if dist.get_rank() == 0 else ():
            logger.info("%s", notice)
        own = self.begin(run, [feature for feature in features if feature.per_model])
        every = {**self._shared, **own}
        assert run.request is not None and run.pipeline is not None
        run.pipeline.callbacks = tuple(part for f in features for part in every[f])
        run.models = ()  # their wrappers may go before the model
        callbacks = [part for parts in own.values() for part in parts]
        of_model = _OfModel(self, run.pipeline, callbacks, models[0])
        self._models.add(of_model)
        if dist.get_rank() == 0:
            logger.info(
                "schedule %s on megatron-core %s for a %s, %d chunk(s) on each of "
                "%d pipeline ranks",
                run.request.name,
                run.version,
                type(unwrapped(models[0])).__name__,
                len(models),
                group.size(),
            )
            logger.debug("%s", self.hooks.report())
        return of_model


class ModelArgs:
    """``MegatronArgs`` without a command line.

    Attributes are those of our options, then of the model's configuration, whose names are those
    of Megatron's arguments. An argument that a configuration does not have is missing here.

    Args:
        options: ours, by attribute name.
        models: the model's chunks on this rank.
        config: the model's ``TransformerConfig``.
        pp: ranks of its pipeline.
        minutes: that messages and collectives may take by the trainer's own limits.
        rank: of this process in the job.
        length, samples: of a microbatch, as the first call gives them.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        models: list[Any],
        config: Any,
        pp: int,
        minutes: float,
        rank: int,
        length: int,
        samples: int,
    ) -> None:
        wrappers = {type(one).__name__ for model in models for one in nested(model)}
        self._known: dict[str, Any] = {
            **options,
            "rank": rank,
            "pipeline_model_parallel_size": pp,
            "distributed_timeout_minutes": minutes,
            "use_megatron_fsdp": any(name.startswith(_FSDP) for name in wrappers),
            "use_torch_fsdp2": "TorchFullyShardedDataParallel" in wrappers,
            "seq_length": length,
            "micro_batch_size": samples,
            **_of_model(unwrapped(models[0]), config),
        }
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._known:
            return self._known[name]
        return getattr(self._config, _RENAMED.get(name, name))


def _of_model(model: Any, config: Any) -> dict[str, Any]:
    """Megatron's arguments that its models have under other names, as far as they have them."""
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    return {
        "padded_vocab_size": getattr(model, "vocab_size", None),
        "position_embedding_type": getattr(model, "position_embedding_type", None),
        "untie_embeddings_and_output_weights": not tied,
        "hybrid_layer_pattern": getattr(model, "hybrid_layer_pattern", None),
        "group_query_attention": getattr(config, "num_query_groups", None) is not None,
        "swiglu": getattr(config, "gated_linear_unit", False),
    }


class _OfModel:
    """What belongs to one model. The model holds it, so that both go at once.

    Copies of a model, and what is pickled of it, do not have it.

    Args:
        callbacks: with state of this model alone.
        model: its first chunk on this rank, with its wrappers.
    """

    def __init__(
        self,
        library: Library,
        pipeline: ScheduledPipeline,
        callbacks: Sequence[Callback],
        model: Any,
    ) -> None:
        self.pipeline, self._callbacks = pipeline, callbacks
        self._model, self._name = weakref.ref(unwrapped(model)), _name_of(library)
        vars(unwrapped(model))[self._name] = self

    @classmethod
    def found(cls, library: Library, model: Any) -> _OfModel | None:
        """That of ``model``, if it is its own and not a copy's."""
        held = vars(unwrapped(model)).get(_name_of(library))
        return held if isinstance(held, cls) and held._model() is unwrapped(model) else None

    def close(self) -> None:
        """End what runs for the model, which goes on without."""
        model = self._model()
        if model is not None:
            vars(model).pop(self._name, None)
        with contextlib.ExitStack() as undo:
            for callback in self._callbacks:
                undo.callback(callback.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()


def _name_of(library: Library) -> str:
    return f"_megatron_ext_pipeline_{id(library):x}"


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def enable(options: Mapping[str, object]) -> Report:
    """See ``megatron_ext.enable``."""

    with in_options():
        library: Library = entry_point.opened(lambda: Library(options), "enable")
    atexit.register(library.warn_if_unused)
    return Report(library.hooks)


_alive: list[Library] = []  # of functions that there are


class DropIn:
    """A forward-backward function for a loop of your own; nothing global stays replaced."""

    def __init__(self, options: Mapping[str, object]) -> None:
        set_up()
        with in_options(), entry_point.set_aside():
            self._library = Library(options, entry=False)
            self._library.open()
            self._library.hooks.pause()
        _alive.append(self._library)
        weakref.finalize(self, _end, self._library).atexit = False

    def __call__(self, **kwargs: Any) -> Any:
        hooks = self._library.hooks
        with entry_point.set_aside():  # of ``enable``, whose hooks are for other models
            hooks.resume()
            try:
                return self._library.forward_backward(**kwargs)
            finally:
                hooks.pause()


def _end(library: Library) -> None:
    """A function is gone: end what runs for its models. Its hooks are paused, and stay so."""
    _alive.remove(library)
    library.hooks.bindings.clear()
    library.revert()
    if not _alive and entry_point.current() is None:
        tear_down()
        close_process_watchdog()
