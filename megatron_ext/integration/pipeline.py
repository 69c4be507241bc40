"""The forward-backward function that Megatron calls instead of its own pipeline schedules."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..plan.layout import Split
from ..plan.profile import Profile
from ..runtime.channel import Channel
from ..runtime.executor import Executor
from ..runtime.post_validation import StepOperations, StepValidator
from ..runtime.trace import Recorder
from ..runtime.watchdog import Watchdog
from ..runtime.wgrad import WeightGradStore
from ..schedule.generators import forward_only as forward_only_schedule
from ..schedule.passes.check import check
from ..schedule.passes.lower import lower
from ..schedule.placement import Placement
from ..schedule.post_validation import add_post_validation, describe_gain, head_length
from ..schedule.schedule import Schedule
from .errors import ConfigError
from .features import profile
from .features.log_line import Meter
from .features.offload import measure as offload_measure
from .features.offload.runtime import Offloading
from .features.post_validation.rewind import Replays, Rewind
from .features.profile import Profiler
from .features.split_backward.split import Splitter
from .features.traces import Traces
from .features.v_placement.vee import reduce_tied_gradients, require_gpt
from .hooks import Seam
from .relay import Relay
from .runner import Call, Iteration, MegatronRunner
from .utils import gather, unwrapped

logger = logging.getLogger(__name__)

WATCHDOG_ENVIRONMENT = "MEGATRON_EXT_WATCHDOG_SECONDS"
_LISTED = 16


@dataclass
class _Run:
    """An iteration that has begun."""

    call: Call
    plan: Schedule
    runner: MegatronRunner
    channel: Channel
    recorder: Recorder
    executor: Executor
    offloading: Offloading | None
    measuring: bool
    rewind: Rewind | None = None


class ScheduledPipeline:
    """Executes schedules inside Megatron's training loop, one iteration a call.

    Args:
        plan: for a number of microbatches, the training schedule (compute and offload actions);
            see ``Choice.plan``.
        placement: of that schedule, and of evaluation.
        store: shared with the hooked linear layers.
        trace_directory: where measured timelines go, or None.
        timeout_seconds: the watchdog's limit; ``MEGATRON_EXT_WATCHDOG_SECONDS`` overrides it.
        offloading: moves activation sets, or None if all stay.
        profiler: measures the first training steps, after which the order is made anew.
        meter: is given every training iteration's times, or None.
        validated: the lowered plans hold optimizer post-validation.
    """

    def __init__(
        self,
        plan: Callable[..., Schedule],
        placement: Placement,
        store: WeightGradStore,
        trace_directory: str | None,
        timeout_seconds: float,
        offloading: Offloading | None = None,
        profiler: Profiler | None = None,
        meter: Meter | None = None,
        validated: bool = False,
    ) -> None:
        self._plan, self._placement, self._store = plan, placement, store
        self._traces = Traces(trace_directory)
        self._timeout = float(os.environ.get(WATCHDOG_ENVIRONMENT, timeout_seconds))
        self._watchdog: Watchdog | None = None
        self._plans: dict[tuple[int, bool], Schedule] = {}
        self._splitter = Splitter(store)
        self._offloading = offloading
        self._meter = meter
        self._profile: Profile | None = None
        self._profiler = profiler or Profiler()
        self._profiler.require(int(offloading is not None and offloading.assumed))
        self._relay = Relay()
        self._validated = validated
        self._replays = Replays()
        self._last: Call | None = None  # of training
        self._head: _Run | None = None  # of the next training iteration

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
            What the loss function reported, one entry a microbatch, on the last pipeline rank and
            on the rank that computes the loss; an empty list elsewhere.

        Raises:
            ConfigError: a feature of this call is not supported.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ConfigError("adjust_tensor_shapes_fn is not supported under --pp-schedule")
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        models = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if self._validated and not forward_only:
            iterators = self._replays.of(iterators)
        iteration = Iteration(
            forward_step_func,
            iterators,
            models,
            get_model_config(models[0]),
            num_microbatches,
            parallel_state.get_context_parallel_world_size(),
            forward_only,
            collect_non_loss_data,
            first_val_step,
        )
        group = getattr(pg_collection, "pp", None) or (
            parallel_state.get_pipeline_model_parallel_group()
        )
        length = decoder_seq_length if decoder_seq_length is not None else seq_length
        shape = message_shape(length, micro_batch_size, iteration)
        timers = iteration.config.timers
        if timers is not None:
            barrier = iteration.config.barrier_with_L1_time
            timers("forward-backward", log_level=1).start(barrier=barrier)
        call = Call(iteration, group, shape, (length, micro_batch_size))
        if self._head is not None and not self._head.call.is_as(call):
            self.drop_head()
        run, self._head = self._head or self._begin(call), None
        losses = self._complete(run, call)
        if not forward_only:
            self._last = call
            detail = f"for gradients to be reduced over {_gradient_ranks()}"
            with self._watch(group.rank()).armed(detail):
                self._finalize(iteration, run.runner, pg_collection, force_all_reduce)
        if timers is not None:
            timers("forward-backward").stop()
        return losses

    def seams(self) -> tuple[Seam, ...]:
        """The seam around Megatron's training step, of which the passes are a part."""
        return (
            Seam(
                ("megatron.training.training:train_step",),
                self._watched_step,
                ("forward_step_func", "optimizer"),
                "a rank that waits before or behind its passes would not be watched",
            ),
        )

    def _watched_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            from megatron.core import parallel_state

            rank = parallel_state.get_pipeline_model_parallel_rank()
            detail = "for other ranks before or behind its passes (optimizer, checks of all ranks)"
            with self._watch(rank).armed(detail, quiet=(ConfigError,)):
                return original(*args, **kwargs)

        return train_step

    def release(self) -> None:
        """Give the model its own weight-gradient stores back, and the host its memory."""
        try:
            self._relay.finish()
        finally:
            self._splitter.release()
            if self._offloading is not None:
                self._offloading.close()

    @property
    def can_run_head(self) -> bool:
        """True if the next training iteration can be begun before Megatron asks for it: it will
        be as the last one, by the same plan."""
        return self._last is not None and not self._profiler.active

    @property
    def group(self) -> Any:
        """The process group of the last training iteration's pipeline."""
        assert self._last is not None
        return self._last.group

    @property
    def device(self) -> torch.device:
        """Where the last training iteration's model lies."""
        assert self._last is not None
        device: torch.device = next(self._last.iteration.models[0].parameters()).device
        return device

    def run_head(self, validator: StepValidator) -> None:
        """Begin the next training iteration, after the step before it, up to its validation.

        The next call goes on from there, if it is as the last one was; else, or if anything else
        comes first, ``drop_head`` has to be called, on all ranks.

        Args:
            validator: of that step.
        """
        call = self._last
        assert call is not None and self._head is None
        rewind = Rewind(call.iteration.models, call.iteration.data_iterators)
        run = self._begin(call, validator)
        run.rewind = rewind
        try:
            with self._watch(call.group.rank()).armed():
                run.executor.run(until=head_length(run.plan.ranks[call.group.rank()]))
        except BaseException:
            self._fail(run)
            raise
        rewind.pause()
        self._head = run

    def drop_head(self) -> None:
        """Undo the begin of an iteration, if there is one; the next call begins it again."""
        run, self._head = self._head, None
        if run is None:
            return
        with self._watch(run.call.group.rank()).armed():
            run.executor.drop()
        self._forget(run)
        assert run.rewind is not None
        run.rewind.undo()
        for model in run.call.iteration.models:
            _forget_gathered(model)

    def _fail(self, run: _Run) -> None:
        self._forget(run)
        self._relay = Relay()  # Whoever would take the former losses may be gone.

    def _forget(self, run: _Run) -> None:
        self._store.clear()
        if run.offloading is not None:
            run.offloading.clear()

    def _begin(self, call: Call, validator: StepValidator | None = None) -> _Run:
        """Everything before the first pass."""
        iteration, group, shape = call.iteration, call.group, call.shape
        models, forward_only = iteration.models, iteration.forward_only
        bare = [unwrapped(model) for model in models]
        offloading = None if forward_only else self._offloading
        if offloading is not None:
            offloading.begin(models, group)
        plan = self._lowered(iteration.num_microbatches, forward_only)
        if len(models) != plan.chunks:
            raise ConfigError(
                f"schedule {plan.name} has {plan.chunks} chunks a rank but the model was built "
                f"with {len(models)}"
            )
        if plan.splits_backward:
            self._splitter.prepare(models, group, plan.name)
        if plan.placement.is_vee():
            require_gpt(bare, plan.name)
        rank, device = group.rank(), next(models[0].parameters()).device
        if offloading is not None:
            offloading.start(plan, rank, iteration.config, shape)
        measuring = not forward_only and self._profiler.active
        sizes = self._profiler.sizes(bare, self._store) if measuring else None
        runner = MegatronRunner(iteration, plan.placement, rank, self._store, offloading, sizes)
        channel = Channel(group, shape, iteration.config.pipeline_dtype, device)
        meter = None if forward_only else self._meter
        timed = measuring or meter is not None or self._traces.directory is not None
        recorder = Recorder(timed, device)
        watchdog = self._watch(rank)
        steps = StepOperations(validator) if validator else None
        executor = Executor(plan, rank, runner, channel, watchdog, recorder, steps)
        if validator is None:
            self.start_param_sync(call)
        return _Run(call, plan, runner, channel, recorder, executor, offloading, measuring)

    def _complete(self, run: _Run, call: Call) -> list[Any]:
        """The passes that are left, and what is to be done with their times; returns what the loss
        reported."""
        plan, runner, recorder, offloading = run.plan, run.runner, run.recorder, run.offloading
        group, rank, iteration = call.group, call.group.rank(), call.iteration
        watchdog = self._watch(rank)
        if run.rewind is not None:
            run.rewind.go_on()
        try:
            with watchdog.armed():
                run.executor.run()
                runner.check_finished()
                losses = self._relay.losses(
                    plan.placement, group, runner, run.channel.device, watchdog, plan.is_extended
                )
        except BaseException:
            self._fail(run)
            raise
        meter = None if iteration.forward_only else self._meter
        if meter is not None:
            meter.add(recorder, group)
        self._traces.write(
            plan,
            rank,
            recorder,
            losses,
            offloading,
            self._splitter.summary(),
            iteration.forward_only,
        )
        measured = run.measuring and self._profiler.add(recorder, plan.placement)
        if offloading is not None:
            offloading.end(plan, rank, replaced=measured)
        if measured:
            self._measured(plan, iteration, group, run.channel, call.batch)
        return losses

    def _measured(
        self,
        plan: Schedule,
        iteration: Iteration,
        group: Any,
        channel: Channel,
        batch: tuple[int, int],
    ) -> None:
        """Take the times and sizes of the first steps into the plans of those that follow."""
        profiler, rank, placement = self._profiler, group.rank(), plan.placement
        durations, offloading = profiler.take(), self._offloading
        hop = profile.hop_seconds(channel, group) if profiler.reorders else 0.0
        rates = None if offloading is None else offloading.rates
        if profiler.path is not None and rates is None:
            rates = offload_measure.host_rates(channel.device, group)
        self._profile = profiler.agree(
            placement,
            rank,
            profile.pass_seconds(durations),
            hop,
            [unwrapped(model) for model in iteration.models],
            batch,
            None if offloading is None else offloading.set_bytes,
            rates,
        )
        profiler.save(self._profile)
        if offloading is not None:
            # A pass may have waited for a copy; that must not make the link look fast.
            offloading.measured(profile.pass_seconds(durations, min), placement, rank)
        self._plans = {key: kept for key, kept in self._plans.items() if key[1]}

    def _lowered(self, microbatches: int, forward_only: bool) -> Schedule:
        """The lowered plan, made and verified once for each number of microbatches."""
        key = (microbatches, forward_only)
        if key not in self._plans:
            if forward_only:
                plan = forward_only_schedule(self._placement, microbatches)
            else:
                measured = self._profile
                reorder = self._profiler.reorders and measured is not None
                link = None if self._offloading is None else self._offloading.link
                costs = None if measured is None else measured.costs(Split(measured.layers))
                plan = self._plan(
                    microbatches, link=link, costs=costs, reorder=reorder, profile=measured
                )
                if reorder and dist.get_rank() == 0:
                    logger.warning("megatron_ext: %s", plan.note)
            lowered = lower(plan)
            if self._validated and not forward_only:
                lowered = add_post_validation(lowered)
            check(lowered, forward_only=forward_only)
            _require_equal_plans(lowered)
            if lowered.is_extended and dist.get_rank() == 0:
                logger.warning("megatron_ext: %s", describe_gain(lowered))
            if self._offloading is not None and not forward_only and dist.get_rank() == 0:
                logger.warning("megatron_ext: %s", self._offloading.describe(lowered))
            self._plans[key] = lowered
        return self._plans[key]

    def _watch(self, rank: int) -> Watchdog:
        if self._watchdog is None:
            name = f"pipeline rank {rank} (global rank {dist.get_rank()})"
            self._watchdog = Watchdog(name, self._timeout)
        return self._watchdog

    def start_param_sync(self, call: Call | None = None) -> None:
        """Start gathering parameters ahead of the first forward passes of ``call`` (None: of one
        like the last), if Megatron overlaps it."""
        call = call or self._last
        assert call is not None
        sync = call.iteration.config.param_sync_func
        if sync is None or call.iteration.forward_only:
            return
        for chunk, chunk_model in enumerate(call.iteration.models):
            start = sync[chunk] if isinstance(sync, list) else sync
            start(chunk_model.parameters())

    def _finalize(
        self,
        iteration: Iteration,
        runner: MegatronRunner,
        pg_collection: Any,
        force_all_reduce: bool | None,
    ) -> None:
        """Reduce gradients as stock does at the end of an iteration."""
        finalize = iteration.config.finalize_model_grads_func
        if finalize is None:
            return
        accepted = inspect.signature(finalize).parameters
        kwargs = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
        finalize(
            iteration.models,
            runner.num_tokens if iteration.config.calculate_per_token_loss else None,
            **{k: v for k, v in kwargs.items() if k in accepted},
        )
        if runner.placement.is_vee():
            reduce_tied_gradients([unwrapped(m) for m in iteration.models])


def message_shape(
    length: int, micro_batch_size: int, iteration: Iteration
) -> tuple[int, ...] | None:
    """Shape of what travels between stages: (sequence on this rank, microbatch, hidden).

    None where it differs between microbatches, or (multi-token prediction on a stage of its own,
    which passes several hidden states on) between stages.
    """
    config = iteration.config
    if config.variable_seq_lengths or getattr(config, "mtp_standalone", False):
        return None
    length //= iteration.cp_size
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    return (length, micro_batch_size, config.hidden_size)


def _gradient_ranks() -> str:
    """Who takes part in reducing this rank's gradients."""
    from megatron.core import parallel_state

    try:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    except AssertionError:  # the groups came with the call
        return "the data-parallel ranks"
    ranks = dist.get_process_group_ranks(group)
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"global ranks {ranks[:_LISTED]}{more}, and the embeddings' ranks"


def _require_equal_plans(plan: Schedule) -> None:
    """All ranks must follow one plan. Another one in the pipeline would deadlock or mix data, and
    another pipeline's would enter tensor- and data-parallel collectives in another order."""
    every = gather(plan.fingerprint())
    if len(set(every)) != 1:
        raise ConfigError(
            f"ranks made different plans for schedule {plan.name}: {every}; start all "
            "ranks with the same flags, schedule file and megatron_ext version"
        )


def _forget_gathered(model: Any) -> None:
    """Parameters will be gathered again before they are used, where Megatron overlaps that: what
    has begun for the dropped passes may be of a step that is undone now."""
    groups = [
        *getattr(model, "bucket_groups", ()),
        *getattr(model, "expert_parallel_bucket_groups", ()),
    ]
    for bucket_group in groups:
        if bucket_group.param_gather_handle is not None:
            bucket_group.param_gather_handle.wait()
            bucket_group.param_gather_handle = None
        bucket_group.param_gather_dispatched = False
