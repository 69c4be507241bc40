"""The forward-backward function that Megatron calls instead of its own pipeline schedules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..runtime.channel import Channel
from ..runtime.edges import DEFAULT, MessageOptions, connected
from ..runtime.executor import Executor
from ..runtime.trace import Recorder
from ..runtime.watchdog import Watchdog, limit, process_watchdog
from ..runtime.wgrad import WeightGradStore
from .callbacks import Callback, Step, arranged
from .errors import ConfigError
from .plans import Plans
from .runner import Call, Iteration, MegatronRunner
from .utils import chunks_of

_LISTED = 16
# Options of the model's configuration with which messages are not all of one known shape.
_OTHER_SHAPES = (
    "variable_seq_lengths",
    "mtp_standalone",
    "enable_mhc_connections",
    "enable_hyper_connections",  # as Megatron's branch dev calls them
)
# Over how many data replicas weights are spread, which gather them for every pass.
_WEIGHTS_IN_PARTS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")


class ScheduledPipeline:
    """Executes schedules inside Megatron's training loop, one iteration a call.

    Args:
        plans: the lowered schedule of every number of microbatches.
        store: of delayed weight gradients, shared with the hooked linear layers.
        timeout_seconds: the watchdog's limit; ``MEGATRON_EXT_WATCHDOG_SECONDS`` overrides it.
        messages: how messages between ranks travel.

    Attributes:
        callbacks: of the features in use.
    """

    def __init__(
        self,
        plans: Plans,
        store: WeightGradStore,
        timeout_seconds: float,
        messages: MessageOptions = DEFAULT,
    ) -> None:
        self._plans, self._store = plans, store
        self._timeout = limit(timeout_seconds)
        self.callbacks: Sequence[Callback] = ()
        self.messages = messages

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all passes of one iteration; Megatron's keyword arguments and return value.

        Returns:
            What the loss function reported, one entry a microbatch, on the last pipeline rank; an
            empty list elsewhere.

        Raises:
            ConfigError: a feature of this call is not supported.
        """
        from megatron.core.utils import get_model_config

        models, iterators = chunks_of(model), chunks_of(data_iterator)
        if len(iterators) != len(models):
            raise ConfigError(
                f"data_iterator has {len(iterators)} iterator(s), but this rank has {len(models)} "
                "model chunk(s); give a list with one for each chunk, each over all microbatches"
            )
        for callback in self.callbacks:
            iterators = callback.data_iterators(iterators, not forward_only)
        iteration = Iteration(
            forward_step_func,
            iterators,
            models,
            get_model_config(models[0]),
            num_microbatches,
            _context_parallel_size(pg_collection),
            forward_only,
            collect_non_loss_data,
            first_val_step,
        )
        group = pipeline_group(p2p_communicator, pg_collection)
        waiting = None if forward_only else iteration.config
        groups = groups_of_call(group, pg_collection, waiting)
        length = seq_length
        if decoder_seq_length is not None and len(models) == 1:
            length = decoder_seq_length  # stock's interleaved schedule takes no notice of it
        shape = message_shape(length, micro_batch_size, iteration)
        if adjust_tensor_shapes_fn is not None:
            shape = None  # of any shape, which is sent ahead
        timers = iteration.config.timers
        if timers is not None:
            barrier = iteration.config.barrier_with_L1_time
            timers("forward-backward", log_level=1).start(barrier=barrier)
        call = Call(iteration, group, shape, (length, micro_batch_size), groups)
        with self.watchdog(group.rank()).armed("for other ranks to begin"):
            step = self._run(call, pg_collection, force_all_reduce)
        if timers is not None:
            timers("forward-backward").stop()
        return step.losses

    def _run(self, call: Call, pg_collection: Any, force_all_reduce: bool | None) -> Step:
        """One iteration, which other ranks may let wait at any place."""
        step = self._begin(call)
        self._complete(step)
        if step.training:
            detail = f"for gradients to be reduced over {_gradient_ranks()}"
            with self.watchdog(step.rank).armed(detail):
                tokens = step.runner.num_tokens
                if finalize(call.iteration, tokens, pg_collection, force_all_reduce):
                    for callback in self.callbacks:
                        callback.gradients_reduced(step)
        with self.watchdog(step.rank).armed("for the losses"):
            for callback in reversed(self.callbacks):
                callback.returning(step)
        return step

    def watched(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Megatron's ``train_step``, of which the passes are a part, under the watchdog."""
        from megatron.core import parallel_state

        rank = parallel_state.get_pipeline_model_parallel_rank()
        detail = "for other ranks before or behind its passes (optimizer, checks of all ranks)"
        with self.watchdog(rank).armed(detail):
            return original(*args, **kwargs)

    def watchdog(self, rank: int) -> Watchdog:
        """The watchdog of this process, which is ``rank`` in its pipeline."""
        watchdog = process_watchdog()
        everywhere = f" (global rank {dist.get_rank()})" if dist.is_initialized() else ""
        watchdog.name = f"pipeline rank {rank}{everywhere}"
        watchdog.timeout_seconds = self._timeout
        return watchdog

    @property
    def plans(self) -> Plans:
        """Of all numbers of microbatches."""
        return self._plans

    def _begin(self, call: Call) -> Step:
        """Everything before the first pass.

        Raises:
            ConfigError: the plan does not fit the model or the machine.
        """
        iteration, step = call.iteration, Step(call, self.callbacks)
        for callback in self.callbacks:
            callback.before_plan(step)
        step.plan = plan = self._plans.lowered(
            iteration.num_microbatches,
            step.training,
            call.group,
            self.watchdog(step.rank).armed,
            self.callbacks,
            step.loads,
            call.groups,
        )
        if step.loads is not None:
            step.loads = arranged(step.loads, plan)
        if len(iteration.models) != plan.chunks:
            raise ConfigError(
                f"the schedule has {plan.chunks} model chunks a rank, but the model was built with "
                f"{len(iteration.models)}"
            )
        for callback in self.callbacks:
            callback.begin(step)
        rank, device = step.rank, call.device
        with self.watchdog(rank).armed("for its neighbours, to connect with them"):
            step.runner = (step.runner_type or MegatronRunner)(
                iteration, plan.placement, rank, self._store, step.mover, step.observer
            )
            if step.loads is not None and step.loads.units:
                step.runner.sizes = [float(row[-1]) for one in step.loads.units for row in one]
            ways, shapes = plan.placement.edges, step.shape is None
            edges = connected(call.group, "passes", ways, device, self.messages, shapes)
        step.channel = Channel(edges, step.shape, iteration.config.pipeline_dtype, device)
        timed = any(callback.times(step.training) for callback in self.callbacks)
        step.recorder = Recorder(timed, device)
        step.executor = Executor(
            plan,
            rank,
            step.runner,
            step.channel,
            self.watchdog(rank),
            step.recorder,
            step.runner.extension(plan),
        )
        start_param_sync(call)
        return step

    def _complete(self, step: Step) -> None:
        """The passes that are left, and what callbacks do afterwards."""
        watchdog = self.watchdog(step.rank)
        try:
            with watchdog.armed():
                step.executor.run()
                step.runner.check_finished()
                step.losses = step.runner.losses
                for callback in self.callbacks:
                    callback.passes_done(step, watchdog)
        except BaseException:
            self._store.clear()
            step.executor.drop()
            for callback in self.callbacks:
                callback.dropped(step)
            raise
        for callback in reversed(self.callbacks):
            callback.end(step)


def pipeline_group(p2p_communicator: Any = None, pg_collection: Any = None) -> Any:
    """The process group that a call's messages go over: its communicator's, its collection's, or
    Megatron's global one.

    Raises:
        ConfigError: the communicator is of another kind than Megatron's own for one pipeline.
    """
    if p2p_communicator is None:
        group = getattr(pg_collection, "pp", None)
        if group is None:
            from megatron.core import parallel_state

            group = parallel_state.get_pipeline_model_parallel_group()
        return group
    kind = type(p2p_communicator)
    if kind.__name__ != "P2PCommunicator":
        raise ConfigError(
            f"p2p_communicator is a {kind.__module__}.{kind.__qualname__}, which may send to other "
            "places than the neighbours in one pipeline; a schedule of megatron_ext works with "
            "Megatron's P2PCommunicator or without one"
        )
    return p2p_communicator.pp_group


def groups_of_call(pipeline: Any, pg_collection: Any = None, config: Any = None) -> tuple[Any, ...]:
    """The groups whose ranks run one call together, so that one may wait for the others: pipeline,
    tensor, context and expert parallel. Data replicas may have other calls, unless passes wait for
    them, too: with routers that are balanced over all, FP8 scales that are the same on all, and
    weights of which they hold parts (GTP).

    Args:
        pipeline: the call's pipeline.
        pg_collection: the call's; None: Megatron's global groups.
        config: the model's, if it is trained: evaluation waits for no replica.
    """
    names = ("tp", "cp", "tp_ep", *(("tp_dp_cp",) * _replicas_wait(config)))
    if pg_collection is not None:
        found = [getattr(pg_collection, name, None) for name in names]
    else:
        from megatron.core import parallel_state as state

        getters = {
            "tp": state.get_tensor_model_parallel_group,
            "cp": state.get_context_parallel_group,
            "tp_ep": state.get_expert_tensor_and_model_parallel_group,
            "tp_dp_cp": functools.partial(
                state.get_tensor_and_data_parallel_group, with_context_parallel=True
            ),
        }
        found = [getters[name](check_initialized=False) for name in names]
    return (pipeline, *(g for g in found if g is not None and g.size() > 1))


def _replicas_wait(config: Any) -> bool:
    """Passes of a model with this configuration wait for the same ones of its data replicas."""
    balanced = getattr(config, "moe_router_load_balancing_type", None) or ()
    delayed = getattr(config, "fp8", None) and config.fp8_recipe == "delayed"
    parts = [getattr(config, name, 1) for name in _WEIGHTS_IN_PARTS]
    scaled = bool(delayed and not config.tp_only_amax_red)
    return "global_aux_loss" in balanced or scaled or max(parts) > 1


def _context_parallel_size(pg_collection: Any) -> int:
    group = getattr(pg_collection, "cp", None)
    if group is not None:
        return int(group.size())
    from megatron.core import parallel_state

    return int(parallel_state.get_context_parallel_world_size())


def start_param_sync(call: Call) -> None:
    """Start gathering parameters ahead of the first forward passes, if Megatron overlaps it."""
    sync = call.iteration.config.param_sync_func
    if sync is None or call.iteration.forward_only:
        return
    for chunk, chunk_model in enumerate(call.iteration.models):
        start = sync[chunk] if isinstance(sync, list) else sync
        start(chunk_model.parameters())


def message_shape(
    length: int, micro_batch_size: int, iteration: Iteration
) -> tuple[int, ...] | None:
    """Shape of what travels between stages: (sequence on this rank, microbatch, hidden).

    None where it differs between microbatches, or between stages, or is not that: multi-token
    prediction on a stage of its own passes several hidden states on, hyper-connections pass all
    their residual streams on.
    """
    config = iteration.config
    if any(getattr(config, name, False) for name in _OTHER_SHAPES):
        return None
    length //= iteration.cp_size
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    return (length, micro_batch_size, config.hidden_size)


def finalize(
    iteration: Iteration, tokens: Any, pg_collection: Any, force_all_reduce: bool | None
) -> bool:
    """Reduce gradients as stock does at the end of an iteration; False if nobody asked for it.

    Args:
        tokens: that this rank's losses have counted.
    """
    function = iteration.config.finalize_model_grads_func
    if function is None:
        return False
    accepted = inspect.signature(function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
    kwargs = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    function(
        iteration.models,
        tokens if iteration.config.calculate_per_token_loss else None,
        **{k: v for k, v in kwargs.items() if every or k in accepted},
    )
    return True


def _gradient_ranks() -> str:
    """The ranks that take part in reducing this rank's gradients."""
    from megatron.core import parallel_state

    try:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    except AssertionError:  # the groups came with the call
        return "the data-parallel ranks"
    ranks = dist.get_process_group_ranks(group)
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"global ranks {ranks[:_LISTED]}{more}, and the embeddings' ranks"
