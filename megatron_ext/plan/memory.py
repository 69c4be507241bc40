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


class _Effect(NamedTuple):
    """What one kind of pass or copy changes of its rank's bytes.

    Attributes:
        more: that it adds as it starts; ``less``: and frees as it ends.
        passing: that are there beside these while it runs.
        host, back: the same of the host as ``more`` and ``less``.
    """

    more: int = 0
    less: int = 0
    passing: int = 0
    host: int = 0
    back: int = 0


class _Parts:
    """What each unit's set has of a stage's."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageBytes]) -> None:
        self.whole = [stage.sets for stage in stages]
        # Units of one kind have the same bytes: their share, and the carried tensors at the ends.
        self.kinds: Sequence[tuple[Fraction, bool, bool]] = ()
        if schedule.has_units:
            costs, whole = schedule.unit_costs()
            ends = [(False, False)] * len(costs)
            if schedule.slices:
                ends = [(i == 0, i == n - 1) for n in schedule.slices for i in range(n)]
            self.kinds = [(Fraction(one.size, whole), *end) for one, end in zip(costs, ends)]

    def of(self, stage: int, unit: int) -> tuple[SetBytes, int, int, int]:
        """The set of a unit with what its passes need, and of what slices share: keys and values
        that its F adds, gradients that its B adds, and both that its B frees. They are there from
        the first F, or B, to the last B."""
        one = self.whole[stage]
        if not self.kinds:
            return one, 0, 0, 0
        share, first, last = self.kinds[unit]
        fields = {name: -int(-size * share // 1) for name, size in one._asdict().items()}
        fields["buffers"] = one.buffers
        keys, gradients = one.carried, one.carried_back
        return SetBytes(**fields), first * keys, last * gradients, first * (keys + gradients)


def _effect(
    op: Operation, of: tuple[SetBytes, int, int, int], waiting: int, embeds: bool
) -> _Effect:
    """Of a unit's pass, or copy.

    Args:
        of: ``_Parts.of``.
        waiting: embeddings of all the rank's stages, which E and G keep and free.
        embeds: the rank has such passes.
    """
    one, keys, gradients, carried = of
    kept, own = one.bytes_f_to_b, one.waiting * embeds
    if op is Op.F:
        return _Effect(kept - own + keys, 0, one.logits + own, one.host)
    if op is Op.B or op is Op.BW:
        # On the way from one to the other it is never more than the larger of them.
        later = one.bytes_b_to_w if op is Op.B else 0
        passing = max(later - kept, 0) + one.recompute_bytes + one.layer + one.logits + one.gathered
        return _Effect(gradients, carried + kept - later - own, passing, back=one.host)
    return {
        Op.W: _Effect(less=one.bytes_b_to_w, passing=one.gathered),
        S: _Effect(one.shard, passing=one.scores),
        T: _Effect(less=one.shard, passing=one.scores),
        E: _Effect(waiting),
        G: _Effect(less=waiting),
        Op.PREPARE: _Effect(kept),
        Op.RELEASE: _Effect(less=kept),
        Op.OFFLOAD: _Effect(host=kept),
    }.get(op, _Effect())


def _rank(
    rank: int,
    row: Sequence[AnyAction],
    parts: _Parts,
    states: StateBytes,
    messages: int,
) -> RankBytes:
    actions = [(position, part) for position, action in enumerate(row) for part in action.parts]
    sets = [parts.whole[s] for s in {part.stage for _, part in actions}]
    messages += max((one.buffers for one in sets), default=0)
    waiting = sum(one.waiting for one in sets)
    embeds = any(part.op is E for _, part in actions)
    known: dict[tuple[object, ...], _Effect] = {}
    on_host: set[tuple[int, int]] = set()
    kinds = parts.kinds
    resident = host = most_host = 0
    best: tuple[int, int, int, int] = (-1, 0, 0, 0)
    for position, (op, stage, unit) in actions:
        kind = (op, stage, kinds[unit]) if kinds else (op, stage)
        effect = known.get(kind)
        if effect is None:
            effect = known[kind] = _effect(op, parts.of(stage, unit), waiting, embeds)
        more, less, passing, sent, back = effect
        resident += more
        if resident + passing > best[0]:
            best = resident + passing, resident, passing, position
        resident -= less
        host += sent
        most_host = max(most_host, host) if sent else most_host
        host -= back
        if op is Op.OFFLOAD:
            on_host.add((stage, unit))
        elif (op is Op.B or op is Op.BW) and (stage, unit) in on_host:
            host -= parts.of(stage, unit)[0].bytes_f_to_b
    _, kept, passing, position = best
    at = str(row[position]) if row else ""
    return RankBytes(rank, states, kept, passing + messages, most_host, at)
