"""Peak bytes of every rank of a schedule: states, activation sets, the running pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ..schedule.actions import AnyAction, Op, Operation
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule
from ..schedule.units import Unit
from ..schedule.vocabulary import E, G, S, T
from .activations import SetBytes, stage_set, with_shard
from .layout import Split
from .model import Job
from .parameters import Count, StateBytes, shard_parameters, stage_parameters, state_bytes

MESSAGES = 4  # stage inputs and outputs that are on their way, to and from both neighbours

ASSUMPTIONS = (
    "activations: 16-bit flash attention keeps no scores (--attention-backend unfused does), "
    "fused kernels keep the inputs of norms and activation functions and no more",
    "experts get equally many tokens (or --moe-expert-capacity-factor's)",
    "between B and W a set keeps what linear layers need: their inputs and output gradients, of "
    "which sequence-parallel ranks keep their parts (all of quantized ones)",
    "while B runs, one layer's widest gradients are there beside the sets",
    f"{MESSAGES} messages of a stage's output are on the way on every rank",
    "not counted: workspaces of libraries and communicators, fragmentation (see the reserve)",
)


class StageBytes(NamedTuple):
    """One stage: its parameters, what stays for them, and one activation set."""

    parameters: Count
    states: StateBytes
    sets: SetBytes


@dataclass(frozen=True)
class RankBytes:
    """The peak of one rank, in bytes.

    Attributes:
        states: parameters, gradients and optimizer states.
        kept: activation sets on the device at the peak.
        passing: what the pass that runs then needs beside them, and messages.
        host: most bytes of sets on the host at once.
        at: the action at the peak, as text.
    """

    rank: int
    states: StateBytes
    kept: int
    passing: int
    host: int
    at: str

    @property
    def total(self) -> int:
        """All that is on the device."""
        return self.states.total + self.kept + self.passing

    def largest_part(self) -> tuple[str, int]:
        """The part with most bytes, and these."""
        parts = {
            "parameters": self.states.parameters,
            "gradients": self.states.gradients,
            "optimizer states": self.states.optimizer,
            "activations": self.kept,
            "the running pass": self.passing,
        }
        return max(parts.items(), key=lambda part: part[1])


def stage_bytes(job: Job, split: Split) -> list[StageBytes]:
    """What every stage of a split takes; a shard of the vocabulary counts to its rank's first."""
    out, known = [], _known(job)
    for number, stage in enumerate(split.stages):
        first = number < job.pipeline_model_parallel_size
        key = tuple(job.layers[number] for number in stage.layers), stage[1:], first
        if key not in known:
            total = stage_parameters(job, stage) + (shard_parameters(job) if first else Count())
            sets = stage_set(job, stage)
            if first:
                sets = with_shard(job, sets)
            known[key] = StageBytes(total, state_bytes(job, total), sets)
        out.append(known[key])
    return out


@lru_cache(maxsize=256)
def _known(job: Job) -> dict[tuple[object, ...], StageBytes]:
    """Stages of the job that were counted already: a search asks for few, again and again."""
    return {}


def growth(stages: Sequence[StageBytes]) -> Fraction:
    """Bytes of a set between B and W, as a multiple of its bytes between F and B, in hundredths: of
    the stage where this is most, and at least 1."""
    sets = [stage.sets for stage in stages if stage.sets.bytes_f_to_b]
    more = (-(-100 * one.bytes_b_to_w // one.bytes_f_to_b) for one in sets)
    return Fraction(max(100, *more), 100)


def message_bytes(job: Job) -> int:
    """What one stage sends to the next for one microbatch."""
    return job.element_bytes * job.sharded_tokens * job.hidden_size


def states_of(placement: Placement, stages: Sequence[StageBytes]) -> list[StateBytes]:
    """Per rank, what stays through all steps."""
    return [sum((stages[s].states for s in row), StateBytes()) for row in placement.stages]


def rank_bytes(schedule: Schedule, stages: Sequence[StageBytes], messages: int) -> list[RankBytes]:
    """Every rank's peak under ``schedule``, from the order of its actions alone.

    Of a slice's set and of its pass everything counts by the share of its tokens. What slices
    share, the keys and values of the whole microbatch, counts beside their sets in full.

    Args:
        schedule: with its offload actions, if it has some.
        stages: one a stage.
        messages: bytes of one message.
    """
    states = states_of(schedule.placement, stages)
    parts = _Parts(schedule, stages)
    return [
        _rank(rank, row, parts, states[rank], MESSAGES * messages)
        for rank, row in enumerate(schedule.ranks)
    ]


class _Parts:
    """What each unit's set has of a stage's."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageBytes]) -> None:
        self.whole = [stage.sets for stage in stages]
        self._slices = schedule.slices
        self._shares: Sequence[Fraction] = ()
        if schedule.has_units:
            costs, whole = schedule.unit_costs()
            self._shares = [Fraction(cost.size, whole) for cost in costs]
        self._known: dict[tuple[int, Fraction], SetBytes] = {}

    def of(self, stage: int, unit: int) -> SetBytes:
        """The set of a unit, and what its passes need."""
        one = self.whole[stage]
        if not self._shares:
            return one
        key = stage, self._shares[unit]
        if key not in self._known:
            share = self._shares[unit]
            fields = {name: -int(-size * share // 1) for name, size in one._asdict().items()}
            fields["buffers"] = one.buffers
            self._known[key] = one._replace(**fields)
        return self._known[key]

    def carried(self, op: Operation, stage: int, unit: int) -> tuple[int, int]:
        """What a pass adds, at its start, to what slices share, and what it leaves less at its
        end: keys and values from the first F to the last B, gradients from the first B on."""
        if not isinstance(unit, Unit) or not self._slices:
            return 0, 0
        one, last = self.whole[stage], self._slices[unit.microbatch] - 1
        keys, gradients = one.carried, one.carried_back
        if op is Op.F:
            return (0 if unit.slice else keys), 0
        if op is not Op.B and op is not Op.BW:
            return 0, 0
        return gradients * (unit.slice == last), (0 if unit.slice else keys + gradients)


def _rank(
    rank: int,
    row: Sequence[AnyAction],
    parts: _Parts,
    states: StateBytes,
    messages: int,
) -> RankBytes:
    resident = host = most_host = 0
    best: tuple[int, int, int, int] = (-1, 0, 0, 0)
    on_host: set[tuple[int, int]] = set()
    passes = [(position, part) for position, action in enumerate(row) for part in action.parts]
    table = {s: parts.whole[s] for s in {part.stage for _, part in passes}}
    messages += max((sets.buffers for sets in table.values()), default=0)
    waiting = sum(sets.waiting for sets in table.values())
    embeds = any(part.op is E for _, part in passes)
    for position, (op, stage, microbatch) in passes:
        one, (more, less) = parts.of(stage, microbatch), parts.carried(op, stage, microbatch)
        resident += more
        passing = messages
        if op is Op.F:
            resident += one.bytes_f_to_b
            resident -= one.waiting * embeds
            passing += one.logits + one.waiting * embeds
            host += one.host
            most_host = max(most_host, host)
        elif op is Op.B or op is Op.BW:
            # On the way from one to the other it is never more than the larger of them.
            grows = max(one.bytes_b_to_w - one.bytes_f_to_b, 0) if op is Op.B else 0
            passing += grows + one.recompute_bytes + one.layer + one.logits + one.gathered
        elif op is Op.W:
            passing += one.gathered
        elif op is S or op is T:
            resident += one.shard if op is S else 0
            passing += one.scores
        elif op is E:
            resident += waiting
        elif op is Op.PREPARE:
            resident += one.bytes_f_to_b
        elif op is Op.OFFLOAD:
            on_host.add((stage, microbatch))
            host += one.bytes_f_to_b
            most_host = max(most_host, host)
        if resident + passing > best[0]:
            best = resident + passing, resident, passing, position
        resident -= less
        if op is Op.B or op is Op.BW:
            resident += (one.bytes_b_to_w if op is Op.B else 0) - one.bytes_f_to_b
            resident += one.waiting * embeds
            host -= one.host
            if (stage, microbatch) in on_host:
                host -= one.bytes_f_to_b
        elif op is Op.W:
            resident -= one.bytes_b_to_w
        elif op is T:
            resident -= one.shard
        elif op is G:
            resident -= waiting
        elif op is Op.RELEASE:
            resident -= one.bytes_f_to_b
    _, kept, passing, position = best
    at = str(row[position]) if row else ""
    return RankBytes(rank, states, kept, passing, most_host, at)
