"""Schedules, offload and MoE chunks in a trainer that does not parse Megatron's arguments.

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
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from .callbacks import Callback
from .errors import ConfigError
from .feature import Feature, Run
from .features import FEATURES
from .features.schedule.entry import entry_hooks, size_hook
from .features.schedule.pipeline import pipeline_of, prepare
from .flags import given, in_options, parsed, require_rules
from .hooks import Hook, Hooks
from .model_args import ModelArgs
from .pipeline import ScheduledPipeline, pipeline_group
from .utils import device_of, time_limit_minutes, unwrapped, watched
from .versions import megatron_version, require_supported

logger = logging.getLogger(__name__)

_COSTS = "microbatch_costs"  # the option that may be a function


class Library:
    """What ``megatron_ext.enable`` puts in force in a process.

    Args:
        options: as ``megatron_ext.enable``.

    Raises:
        ConfigError: an option is unknown, or cannot work without Megatron's arguments.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        version = megatron_version()
        require_supported(version)
        function = options.get(_COSTS)
        if callable(function):
            options = {**options, _COSTS: "lengths"}
        self._options = vars(parsed(options))
        args: Any = SimpleNamespace(**self._options, rank=_rank())
        self._run = run = Run(args, version, training=False, library=True)
        run.lengths_of = function if callable(function) else None
        if not given(args):
            raise ConfigError("--pp-schedule is missing; give one, e.g. 'v-half'")
        require_rules(args, library=True)
        if args.pp_schedule is not None:
            prepare(run)
        for feature in FEATURES:
            feature.check(run)
        self.hooks = Hooks(version)
        self._used = False
        self._shared: dict[Feature, list[Callback]] = {}
        self._hooked: set[Feature] = set()  # of the features with state of one model
        self._models: weakref.WeakSet[_OfModel] = weakref.WeakSet()

    @property
    def vee(self) -> bool:
        """V placement is asked for."""
        return self._run.request is not None and self._run.request.vee

    def start(self, entry: bool) -> None:
        """Bind the hooks that all models share.

        Args:
            entry: Megatron's own functions lead to ``forward_backward``.

        Raises:
            ConfigError: one cannot be bound, or nothing would ever call them.
        """
        hooks: list[Hook] = []
        if entry and self._run.request is not None:
            hooks += entry_hooks(self.forward_backward, lambda: bool(self.hooks.bindings))
            hooks.append(size_hook(self._with_pipeline_check))
            self._require_pipeline()
        for feature in FEATURES:
            if not feature.per_model:
                self._shared[feature] = list(feature.start(self._run))
                hooks += (hook for part in self._shared[feature] for hook in part.hooks())
        self.hooks.apply(hooks)

    def revert(self) -> None:
        """Restore everything."""
        atexit.unregister(self.warn_if_unused)
        with contextlib.ExitStack() as undo:
            undo.callback(self.hooks.revert)
            for callback in (c for part in self._shared.values() for c in part):
                undo.callback(callback.close)
            for of_model in list(self._models):
                undo.callback(of_model.close)

    def forward_backward(self, **kwargs: Any) -> Any:
        """One call of the forward-backward function, for whichever model it is.

        Raises:
            ConfigError: the schedule or an option does not fit this model.
        """
        self._used = True
        with in_options():
            model = kwargs["model"]
            models = model if isinstance(model, list) else [model]
            of_model = _OfModel.found(self, models[0])
            if of_model is None or of_model not in self._models:
                group = pipeline_group(kwargs.get("p2p_communicator"), kwargs.get("pg_collection"))
                size = kwargs["seq_length"], kwargs["micro_batch_size"]
                with watched("for the ranks of its pipeline to prepare the model's first step"):
                    of_model = self._prepared(models, group, size)
            return of_model.pipeline(**kwargs)

    def warn_if_unused(self) -> None:
        """Log that the schedule had no effect, if no pipeline call has come."""
        if not self._used and self._run.request is not None:
            logger.warning(
                "no forward-backward call came for schedule %s, which had no effect; "
                "the trainer must fetch its function by Megatron's get_forward_backward_func()",
                self._run.request.name,
            )

    def _prepared(self, models: list[Any], group: Any, size: tuple[int, int]) -> _OfModel:
        """What is in force for a model that has not come before.

        Args:
            models: its chunks on this rank.
            size: tokens and samples of a microbatch.
        """
        from megatron.core.utils import get_model_config

        config = get_model_config(models[0])
        minutes = time_limit_minutes(group, device_of(models))
        args: Any = ModelArgs(self._options, models, config, group.size(), minutes, _rank(), *size)
        run = self._run.for_model(args, models, group)
        for feature in FEATURES:
            feature.check_model(run)
        pipeline_of(run)
        assert run.request is not None and run.pipeline is not None
        callbacks: list[Callback] = []
        own: list[Callback] = []
        for feature in FEATURES:
            part = self._shared.get(feature)
            if part is None:
                part = list(feature.start(run))
                if part and feature not in self._hooked:
                    self.hooks.apply([hook for callback in part for hook in callback.hooks()])
                    self._hooked.add(feature)
                own += part
            callbacks += part
        run.pipeline.callbacks = tuple(callbacks)
        of_model = _OfModel(self, run.pipeline, own, models[0])
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

    def _with_pipeline_check(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with in_options():
            self._require_pipeline()
        return result

    def _require_pipeline(self) -> None:
        from megatron.core import parallel_state

        assert self._run.request is not None
        if not parallel_state.model_parallel_is_initialized():
            return
        if parallel_state.get_pipeline_model_parallel_world_size() < 2:
            raise ConfigError(
                f"--pp-schedule {self._run.request.name} needs pipeline_model_parallel_size >= 2, "
                "got 1: nothing would call it; raise the size, or do not enable a schedule"
            )


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
