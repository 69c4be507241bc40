"""One emulated model under three executors: ours, Megatron's stock functions, PyTorch's schedules.

What benchmarks/emulated_pipeline.py and executor_overhead.py share. A stage multiplies by a number
and takes the time it is told to, forward, for the input's gradient and for the weight's. The
executors around it are the real ones: ``runtime.executor``, ``forward_backward_pipelining_*`` of
the installed megatron-core, and ``torch.distributed.pipelining``; all use one process group. Every
stage notes what it was made to do, so that an executor which skips work is found out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import megatron_ext.cpu

# Before Megatron is imported: its stock functions ask for a "cuda" tensor.
megatron_ext.cpu.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import schedules as stock_schedules  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402

from benchmarks import torch_lists  # noqa: E402
from benchmarks.emulated import CPU, execute  # noqa: E402
from megatron_ext.runtime.trace import Recorder  # noqa: E402
from megatron_ext.runtime.watchdog import Watchdog  # noqa: E402
from megatron_ext.schedule import Costs, Placement, Schedule, check, generate, lower  # noqa: E402
from megatron_ext.schedule.actions import Action, Op  # noqa: E402

HIDDEN = 8
SHAPE = (HIDDEN, 1, HIDDEN)  # sequence, microbatch, hidden

# Of PyTorch's: class, stages a rank, whether they form a V, whether B and W are two passes.
TORCH = {
    "GPipe": ("ScheduleGPipe", 1, False, False),
    "1F1B": ("Schedule1F1B", 1, False, False),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", 2, False, False),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", 2, False, True),
    "ZBVZeroBubble": ("ScheduleZBVZeroBubble", 2, True, True),
    "DualPipeV": ("ScheduleDualPipeV", 2, True, True),
}


class Pass(torch.autograd.Function):
    """The arithmetic of a stage; its time is taken by the stage's ``spend``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: Any) -> torch.Tensor:
        """``x`` times the weight."""
        ctx.stage = stage
        stage.spend(Op.F)
        ctx.factor = stage.factor
        return x * stage.factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradient of ``x``, and the work on the weight unless that is postponed."""
        stage = ctx.stage
        if stage.postpone:
            stage.spend(Op.B)
        else:
            stage.spend(Op.BW)
        return grad * ctx.factor, None, None


class Stage(torch.nn.Module):
    """One stage of the emulated model, for any of the executors.

    Attributes:
        postpone: B leaves the weight's work to a later ``spend(Op.W)``.
    """

    def __init__(self, number: int, stages: int, config: Any, log: list[Action]) -> None:
        super().__init__()
        self.number, self.last, self.config = number, number == stages - 1, config
        self.model_type = ModelType.encoder_or_decoder  # Megatron asks.
        self.factor = 1.0 + number / 64  # exact in binary
        # What makes the first stage's output need a gradient; nothing is learnt.
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seconds: dict[Op, float] = dict.fromkeys((Op.F, Op.B, Op.W), 0.0)
        self.postpone = False
        self._log, self._counts = log, dict.fromkeys((Op.F, Op.B, Op.W, Op.BW), 0)
        self._given: torch.Tensor | None = None

    def take(self, forward: float, backward_input: float, backward_weight: float) -> None:
        """From now on a pass takes so many seconds."""
        self.seconds = {Op.F: forward, Op.B: backward_input, Op.W: backward_weight}
        self.seconds[Op.BW] = backward_input + backward_weight

    def spend(self, op: Op) -> None:
        """Take the time of ``op``. All executors do a stage's passes in microbatch order."""
        microbatch = self._counts[op]
        self._counts[op] += 1
        self._log.append(Action(op, self.number, microbatch))
        seconds = self.seconds.get(op, 0.0)
        if seconds:
            time.sleep(seconds)

    def restart(self) -> None:
        """A new iteration."""
        self._counts = dict.fromkeys(self._counts, 0)

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """Megatron hands a stage its input so."""
        self._given = tensors[0]

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        """One microbatch; the stage's own input if Megatron has set one."""
        return Pass.apply(x if self._given is None else self._given, self.weight, self)


def batch(microbatches: int) -> list[torch.Tensor]:
    """What enters the first stage."""
    return [torch.full(SHAPE, 1.0 + number) for number in range(microbatches)]


class Way:
    """One executor with one schedule on one rank.

    Attributes:
        name: for people.
        log: what the stages of this rank did in the last step.
        losses: of the last step, where they are computed.
        peak_sets: of the last step, counted as it ran; None where the executor does not count.
    """

    def __init__(self, name: str, rank: int, placement: Placement, microbatches: int) -> None:
        self.name, self.rank, self.placement = name, rank, placement
        self.microbatches = microbatches
        self.log: list[Action] = []
        self.losses: list[float] = []
        self.peak_sets: int | None = None
        self.config = _config(placement)
        count = placement.num_stages
        self.stages = [Stage(s, count, self.config, self.log) for s in placement.stages[rank]]
        self.inputs = batch(microbatches)

    def take(self, forward: float, backward_input: float, backward_weight: float) -> None:
        """Seconds of a rank's F, B and W; a pass of one of v chunks takes 1/v of it."""
        for stage in self.stages:
            v = self.placement.chunks
            stage.take(forward / v, backward_input / v, backward_weight / v)

    def step(self) -> None:
        """One iteration."""
        self.log.clear()
        self.losses = []
        for stage in self.stages:
            stage.restart()
        self.run()

    def run(self) -> None:
        """The executor's own part of ``step``."""
        raise NotImplementedError

    def order(self, logs: list[list[Action]]) -> Schedule:
        """What is simulated: here, what the ranks did, by their ``log``."""
        done = Schedule(
            self.name, self.placement, self.microbatches, tuple(map(tuple, logs)), Costs()
        )
        check(done)
        return done


def _config(placement: Placement) -> TransformerConfig:
    """Megatron's, as its training script would set it for such a pipeline."""
    interleaved = placement.chunks > 1
    return TransformerConfig(
        num_layers=placement.num_stages,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=placement.pp,
        virtual_pipeline_model_parallel_size=placement.chunks if interleaved else None,
        microbatch_group_size_per_vp_stage=placement.pp if interleaved else None,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=True,
    )


class AutogradRunner:
    """The stages as our executor asks for them."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._live: dict[tuple[int, int], Any] = {}

    def forward(self, chunk: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """F."""
        stage = self._way.stages[chunk]
        x = self._way.inputs[microbatch] if x is None else x.requires_grad_(True)
        y = stage(x)
        if stage.last:
            y = y.sum()
            self._way.losses.append(float(y.detach()))
        self._live[chunk, microbatch] = x, y
        return None if stage.last else y.detach()

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, split: bool
    ) -> torch.Tensor | None:
        """B or BW."""
        x, y = self._live[chunk, microbatch]
        self._way.stages[chunk].postpone = split
        torch.autograd.backward(y, grad)
        self._live[chunk, microbatch] = None
        if not split:
            del self._live[chunk, microbatch]
        return x.grad

    def weight(self, chunk: int, microbatch: int) -> None:
        """W."""
        self._way.stages[chunk].spend(Op.W)
        del self._live[chunk, microbatch]

    def move(self, op: Op, chunk: int, microbatch: int) -> None:
        """Nothing is offloaded."""

    def live_sets(self) -> int:
        """Sets held now."""
        return len(self._live)


class Ours(Way):
    """Our executor under a schedule of ours."""

    def __init__(
        self, plan: Schedule, rank: int, watchdog: Watchdog | None = None, timed: bool = False
    ) -> None:
        super().__init__(f"ours {plan.name}", rank, plan.placement, plan.microbatches)
        self.plan = plan
        self._lowered = lower(plan)
        check(self._lowered)
        self._timed = timed
        self._watchdog = watchdog or Watchdog(f"rank {rank}", 300.0)

    def run(self) -> None:
        """With a watchdog, as in training."""
        group = parallel_state.get_pipeline_model_parallel_group()
        recorder = Recorder(self._timed, CPU)
        runner = AutogradRunner(self)
        execute(self._lowered, runner, SHAPE, self._watchdog, recorder=recorder, group=group)
        self.peak_sets = recorder.peak_sets

    def order(self, logs: list[list[Action]]) -> Schedule:
        """The plan, which must be what was done."""
        for rank, (planned, log) in enumerate(zip(self.plan.ranks, logs)):
            if list(planned) != log:
                raise RuntimeError(f"{self.name}: rank {rank} did not do what was planned")
        return self.plan


class MegatronWay(Way):
    """What is called as Megatron's training loop calls it: ``function(**stock arguments)``."""

    def __init__(
        self, name: str, function: Callable[..., Any], rank: int, placement: Placement, m: int
    ) -> None:
        super().__init__(name, rank, placement, m)
        self._function = function

    def run(self) -> None:
        """Stock's arguments."""
        chunks = self.placement.chunks
        report = self._function(
            forward_step_func=self._forward_step,
            data_iterator=[iter(self.inputs) for _ in range(chunks)],
            model=list(self.stages),
            num_microbatches=self.microbatches,
            seq_length=SHAPE[0],
            micro_batch_size=SHAPE[1],
        )
        self.losses = [float(entry["loss"]) for entry in report]

    @staticmethod
    def _forward_step(iterator: Any, stage: Stage) -> Any:
        x = next(iterator) if stage.number == 0 else None
        return stage(x), _loss


def _loss(y: torch.Tensor) -> Any:
    loss = y.sum()
    return loss, {"loss": loss.detach().clone()}


def stock(chunks: int, rank: int, pp: int, microbatches: int) -> MegatronWay:
    """Megatron's own 1F1B, or interleaved with its messages overlapped, as its scripts run it."""
    if chunks == 1:
        function = stock_schedules.forward_backward_pipelining_without_interleaving
        return MegatronWay("stock 1f1b", function, rank, Placement.loop(pp, 1), microbatches)
    function = stock_schedules.forward_backward_pipelining_with_interleaving
    placement = Placement.loop(pp, chunks)
    return MegatronWay("stock interleaved", function, rank, placement, microbatches)


class Torch(Way):
    """One of PyTorch's schedules, with two stages a rank where it takes several.

    Where B and W are two passes, weight gradients are postponed through ``dw_builder``, PyTorch's
    interface for layers that can do so: a stage's B and W cost here what they cost elsewhere.
    (Without it PyTorch leaves all of the first stage's backward pass to W.)
    """

    def __init__(self, name: str, rank: int, pp: int, microbatches: int) -> None:
        cls, chunks, vee, splits = TORCH[name]
        placement = Placement.vee(pp) if vee else Placement.loop(pp, chunks)
        super().__init__(f"torch {name}", rank, placement, microbatches)
        stages = []
        for stage in self.stages:
            stage.postpone = splits
            stages.append(
                PipelineStage(
                    stage,
                    stage.number,
                    placement.num_stages,
                    torch.device("cpu"),
                    input_args=torch.zeros(SHAPE).requires_grad_(stage.number > 0),
                    output_args=torch.zeros(SHAPE).requires_grad_(True),
                    group=parallel_state.get_pipeline_model_parallel_group(),
                    dw_builder=_later(stage) if splits else None,
                )
            )
        made = getattr(pipelining, cls, None) or getattr(pipelining.schedules, cls)
        self._made = made(
            stages[0] if chunks == 1 else stages, microbatches, loss_fn=lambda y, _: y.sum()
        )

    def run(self) -> None:
        """Pre-split inputs, so that splitting is not timed."""
        losses: list[Any] = []
        arguments: dict[str, Any] = {"return_outputs": False, "losses": losses}
        numbers = [stage.number for stage in self.stages]
        if 0 in numbers:
            arguments["arg_mbs"] = [(x,) for x in self.inputs]
        if self.placement.num_stages - 1 in numbers:
            arguments["target_mbs"] = [None] * self.microbatches
        self._made.step(**arguments)
        self.losses = [float(loss.detach()) for loss in losses]

    def order(self, logs: list[list[Action]]) -> Schedule:
        """PyTorch's own list; the stages must have done as much.

        Those with one stage a rank run without a list (the one that torch 2.15 gives for 1F1B
        numbers the last rank's forward passes wrongly): there, what was done.
        """
        if self.placement.chunks == 1:
            return super().order(logs)
        order = torch_lists.order(self.name, self._made, self.microbatches, Costs())
        for rank, (row, log) in enumerate(zip(order.ranks, logs)):
            told = []
            for action in row:
                halves = (Op.B, Op.W) if action.op is Op.BW and self._splits() else (action.op,)
                told += [action._replace(op=half) for half in halves]
            if told != log:
                raise RuntimeError(f"{self.name}: rank {rank} did not do what its list says")
        return order

    def _splits(self) -> bool:
        return self.stages[0].postpone


def _later(stage: Stage) -> Callable[[], Callable[[], None]]:
    """What PyTorch asks after a B pass: the W that is left to do."""
    return lambda: lambda: stage.spend(Op.W)


def ways(names: Iterable[str], rank: int, pp: int, microbatches: int) -> list[Way]:
    """All that is compared: stock's, ours by ``names``, PyTorch's."""
    watchdog = Watchdog(f"rank {rank}", 300.0)
    found: list[Way] = [stock(1, rank, pp, microbatches), stock(2, rank, pp, microbatches)]
    for name in names:
        cap = 3 * 2 * pp // 4 if name == "v-cap" else None
        plan = generate(name, pp, microbatches, memory_cap=cap)
        found.append(Ours(plan, rank, watchdog))
    for name in TORCH:
        # PyTorch refuses DualPipeV below m = 2p.
        if name != "DualPipeV" or microbatches >= 2 * pp:
            found.append(Torch(name, rank, pp, microbatches))
    return found
