"""A configuration for a thousand GPUs, made small enough for CPU ranks.

Everything that decides *how* something is computed stays: parallel sizes as far as the ranks
reach, schedule, dispatcher, recompute, layer patterns. Sizes shrink. The report lists every change
and everything that could not be kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .._megatron_flags import (
    COMPARED,
    GPU,
    LATER,
    LAYOUT,
    MOST,
    NOT_KEPT,
    OTHER,
    OURS,
    OUTSIDE,
    PRECISION,
    RANDOM,
    RANDOM_BECAUSE,
    REPLACEMENTS,
    SHARDED,
    SMALL,
)
from .flags import Flags
from .patterns import Stages, frequencies, hybrid, layout, stages_of

MOST_RANKS = 16
STEPS = 3
TP, PP, CP, EP = (
    f"--{name}-parallel-size"
    for name in ("tensor-model", "pipeline-model", "context", "expert-model")
)
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_PER_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
# Flags that give a rank more than one model chunk.
LAYOUT_OF_CHUNKS = (_VIRTUAL, _PER_VIRTUAL, "--pipeline-model-parallel-layout")
_ETP = "--expert-tensor-parallel-size"
_INSTANCES = "--num-distributed-optimizer-instances"
_DIVISIBLE = "--make-vocab-size-divisible-by"
_GIVEN = (
    *((TP, "TP"), (PP, "PP"), (_VIRTUAL, "VP"), (_PER_VIRTUAL, "layers a virtual stage")),
    *((CP, "CP"), (EP, "EP"), (_ETP, "expert TP"), ("--pp-schedule", "schedule")),
    *(("--num-layers", "layers"), ("--hidden-size", "hidden"), ("--num-experts", "experts")),
    *(("--seq-length", "sequence"), ("--micro-batch-size", "micro batch")),
    ("--global-batch-size", "global batch"),
)
_HEAD = 8  # elements of a head
_VOCABULARY = 64  # tokens a tensor-parallel rank
_TWO_CHUNKS = ("v-", "dualpipev", "auto")
HYBRID = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_FREQUENCIES = (
    *("--moe-layer-freq", "--linear-attention-freq", "--window-attn-skip-freq", "--no-rope-freq"),
)


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """What is run in place of a command.

    Attributes:
        flags: of the layout.
        world: its ranks.
        changes: (flag, before, now) of every size that is smaller.
        lost: (flag, why) of everything that is not kept.
        steps: training steps.
        given: the command's own sizes, in words.
    """

    flags: Flags
    world: int
    changes: tuple[tuple[str, str, str], ...]
    lost: tuple[tuple[str, str], ...]
    steps: int = STEPS
    given: str = ""

    @property
    def stock(self) -> Flags:
        """The layout without our flags."""
        flags = self.flags.copy()
        flags.drop(*flags.of_kind(OURS))
        return flags

    @property
    def ours(self) -> bool:
        """True where flags of ours are given."""
        return bool(self.flags.of_kind(OURS))

    def known(self, names: Collection[str]) -> Shrunk:
        """The same without flags that are none of ``names``; they are listed as lost."""
        unknown = [name for name in self.flags.names if name not in names]
        flags = self.flags.copy()
        flags.drop(*unknown)
        lost = tuple((self.flags.text(name), "no flag of this Megatron") for name in unknown)
        return dataclasses.replace(self, flags=flags, lost=self.lost + lost)

    def reference(self, flags: Flags | None = None) -> Flags:
        """One process without any layout, with the same model, data and batch."""
        flags = (flags or self.flags).copy()
        # Megatron pads the vocabulary to a multiple of this times TP.
        flags.set(_DIVISIBLE, _VOCABULARY * flags.number(TP, 1))
        flags.drop(*flags.of_kind(OURS, LAYOUT))
        for name in flags.matching(HYBRID):
            flags.set(name, flags.values(name)[0].replace("|", ""))
        return flags


def given_sizes(flags: Flags, world: int) -> str:
    """A command's own sizes, as it was understood: a line that its author can check."""
    parts = [
        f"{words} {' '.join(values)}"
        for name, words in _GIVEN
        if (values := flags.values(name)) and values != ["1"]
    ]
    return f"given: {', '.join(parts)}; {f'{world} ranks' if world else 'ranks not said'}"


class Sizes(NamedTuple):
    """Parallel sizes of the small layout."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int


class Shrinker:
    """Makes the flags of a command small.

    Args:
        words: the flags of a training script.
        world: ranks that the command runs on; 0: not known.
        ranks: the most that may be used here.
        steps: training steps to run.

    Raises:
        ValueError: a flag has an impossible value, or the layout needs more ranks.
    """

    def __init__(
        self,
        words: Sequence[str],
        world: int = 0,
        ranks: int = MOST_RANKS,
        steps: int = STEPS,
    ) -> None:
        self._given, self._flags = Flags(words), Flags(words)
        self._ranks, self._steps, self._world = ranks, steps, world
        self._lost = _drop(self._flags)
        # Data-parallel ranks of the command; 0: not known.
        self._ways = world // math.prod(self._number(name, 1) for name in (TP, PP, CP))

    def shrink(self) -> Shrunk:
        """The small configuration."""
        self._small = self._parallel()
        self._layers()
        self._sizes()
        self._batch()
        self._run()
        listed = {flag.split()[0] for flag, _ in self._lost}
        changes = [
            (name, " ".join(self._given.values(name)), " ".join(self._flags.values(name)))
            for name in self._given.names
            if name in self._flags and self._flags.values(name) != self._given.values(name)
            if name not in listed
        ]
        return Shrunk(
            self._flags,
            math.prod(self._small) // self._small.ep,
            tuple(changes),
            tuple(self._lost),
            self._steps,
            given_sizes(self._given, self._world),
        )

    def _number(self, name: str, default: int) -> int:
        return self._given.number(name, default)

    def _least(self, name: str, default: int = 1) -> int:
        """A flag's number in a small run."""
        return min(MOST[name], self._number(name, default))

    def _limit(self, *names: str) -> None:
        """Set those of these flags that are given to their numbers in a small run."""
        for name in names:
            if name in self._flags:
                self._flags.set(name, min(MOST[name], self._flags.number(name, MOST[name])))

    def _parallel(self) -> Sizes:
        """Parallel sizes: two of each kind, four stages; fewer where the ranks do not suffice."""
        flags = self._flags
        tp, pp, cp, ep = map(self._least, (TP, PP, CP, EP))
        etp = self._least(_ETP, self._number(TP, 1))
        if "--use-tp-pp-dp-mapping" in flags and _ETP in flags and pp > 1:
            etp = max(1, tp * cp // ep)  # experts have as many data-parallel ranks as the others
        instances = self._least(_INSTANCES)
        # Experts need so many data-parallel ranks; two are the least that have to agree.
        experts = math.lcm(ep * etp * instances, tp * cp) // (tp * cp)
        dp = needed = math.lcm(experts, math.lcm(instances, cp) // cp)
        if self._ways > 1 or (not self._ways and tp * cp * pp * 2 <= self._ranks):
            dp = max(2, needed)
        while tp * cp * pp * dp > self._ranks and dp > needed:
            dp -= 1
        while tp * cp * pp * dp > self._ranks and pp > 2:
            pp = pp // 2
        if tp * cp * pp * dp > self._ranks:
            raise ValueError(
                f"the smallest layout of this kind has {tp * cp * pp * dp} ranks (TP {tp}, "
                f"PP {pp}, CP {cp}, EP {ep}, DP {dp}), --ranks allows {self._ranks}"
            )
        sizes = ((TP, tp), (PP, pp), (CP, cp), (EP, ep), (_ETP, etp), (_INSTANCES, instances))
        for name, size in sizes:
            if name in flags:
                flags.set(name, size)
        if pp == 1:
            flags.drop(*LAYOUT_OF_CHUNKS)
        if _GROUP in flags:
            flags.set(_GROUP, pp)
        return Sizes(tp, pp, cp, ep, dp)

    def _layers(self) -> None:
        """The fewest layers that keep every stage and every kind of layer."""
        flags = self._flags
        stages, given = self._stages()
        number = self._number("--num-layers", given)
        each = 2 if stages.number < 4 and number >= 2 * given else 1
        count = stages.number * each
        ends = flags.matching(("--decoder-first-pipeline", "--decoder-last-pipeline"))
        if "--pipeline-model-parallel-layout" in flags:
            text, count = layout(flags.values("--pipeline-model-parallel-layout")[0], stages)
            flags.set("--pipeline-model-parallel-layout", text)
        elif ends:
            # One layer a chunk at the ends that differ, two in the middle. In V placement an end
            # is a stage, else a rank.
            folded = self._folded and _VIRTUAL not in flags
            chunks, parts = (1, stages.number) if folded else (stages.chunks, stages.ranks)
            for name in ends:
                flags.set(name, chunks)
            count = chunks * (len(ends) + 2 * (parts - len(ends)))
        elif extra := len(flags.matching(("--account-for-",))):
            count = 2 * stages.number - extra
        elif _PER_VIRTUAL in flags:
            flags.set(_PER_VIRTUAL, each)
        for name in flags.matching(HYBRID):
            text, count = hybrid(flags.values(name)[0], stages)
            flags.set(name, text)
        if "--num-layers" in flags:
            flags.set("--num-layers", count)
        for name in flags.matching(_FREQUENCIES):
            flags.set(name, frequencies(flags.values(name)[0], count))
        self._limit("--recompute-num-layers", "--mtp-num-layers")

    @property
    def _folded(self) -> bool:
        """True for a schedule with V placement."""
        return " ".join(self._flags.values("--pp-schedule")).startswith(_TWO_CHUNKS)

    def _stages(self) -> tuple[Stages, int]:
        """The small pipeline's stages, and how many the command's has."""
        ranks, chunks = self._number(PP, 1), self._number(_VIRTUAL, 1)
        if self._folded:
            chunks = 2
        if _PER_VIRTUAL in self._flags:
            chunks = self._number("--num-layers", 1) // ranks // self._number(_PER_VIRTUAL, 1)
        if text := self._flags.values("--pipeline-model-parallel-layout"):
            chunks = len(stages_of(text[0])) // ranks
        chunks = max(1, chunks)
        small = Stages(self._small.pp, min(chunks, 2 if self._small.pp > 2 else 3))
        if _VIRTUAL in self._flags:
            self._flags.set(_VIRTUAL, small.chunks)
        return small, ranks * chunks

    def _sizes(self) -> None:
        """Hidden sizes, heads, experts, vocabulary, sequence."""
        flags, tp = self._flags, self._small.tp
        heads, groups = self._number("--num-attention-heads", 4), 0
        if "--group-query-attention" in flags or "--num-query-groups" in flags:
            groups = min(self._number("--num-query-groups", 1), 2 * tp, heads)
            flags.set("--num-query-groups", groups)
        heads = groups * min(2, max(1, heads // max(1, groups or heads))) if groups else 2 * tp
        heads = max(heads, 2 * tp)
        flags.set("--num-attention-heads", heads)
        hidden = _HEAD * heads
        flags.set("--hidden-size", hidden)
        flags.set("--ffn-hidden-size", 2 * hidden)
        sizes = {"head": _HEAD, "heads": heads, "hidden": hidden, "half": hidden // 2, "tp": tp}
        sizes["two a tp"] = 2 * tp
        for name, size in SMALL.items():
            if name in flags:
                flags.set(name, sizes[size])
        self._experts()
        self._lengths()
        sequence = 16 * self._small.cp
        for name in ("--seq-length", "--max-position-embeddings"):
            flags.set(name, sequence)
        # A null tokenizer may add one token.
        flags.drop("--vocab-size", "--padded-vocab-size")
        flags.set("--vocab-size", _VOCABULARY * tp - 1)
        flags.set(_DIVISIBLE, _VOCABULARY)

    def _lengths(self) -> None:
        """Slices of so many tokens as a number of them."""
        flags, tokens = self._flags, self._number("--pp-slice-tokens", 0)
        if tokens:
            flags.drop("--pp-slice-tokens")
            flags.set("--pp-slices", max(1, -(-self._number("--seq-length", 1) // tokens)))
        self._limit("--pp-slices")

    def _experts(self) -> None:
        flags = self._flags
        given = self._number("--num-experts", 0)
        if not given:
            return
        groups, topk = "--moe-router-num-groups", "--moe-router-topk"
        self._limit(groups, topk, "--moe-router-group-topk")
        least = 2 * flags.number(topk, MOST[topk]), 2 * flags.number(groups, 1)
        experts = min(given, max(4, 2 * self._small.ep, *least))
        flags.set("--num-experts", experts - experts % self._small.ep)

    def _batch(self) -> None:
        flags = self._flags
        micro = self._least("--micro-batch-size")
        given = self._number("--global-batch-size", 0) // max(
            1, self._number("--micro-batch-size", 1)
        )
        pp, number = self._small.pp, given // max(1, self._ways)
        odd = number % self._number(PP, 1)
        if odd and flags.matching(LAYOUT_OF_CHUNKS):
            self._lost.append((f"{number} microbatches", "stock's virtual stages want multiples"))
            odd = 0
        flags.set("--micro-batch-size", micro)
        flags.set(
            "--global-batch-size", _microbatches(number, pp, bool(odd)) * micro * self._small.dp
        )

    def _run(self) -> None:
        """What all runs have."""
        self._flags.set("--train-iters", self._steps)
        for name, value in COMPARED.items():
            self._flags.set(name, *([] if value is None else [value]))


def _microbatches(number: int, pp: int, odd: bool) -> int:
    """Microbatches of a small batch: more than one round of the steady state, with a part of one
    where the command's number (0: not known) is ``odd``, no multiple of its stages."""
    number = min(number or 3 * pp, 2 * pp + 1 if odd else 3 * pp)
    return max(1, number if odd or number <= pp else number - number % pp)


def _drop(flags: Flags) -> list[tuple[str, str]]:
    """Drop what CPU ranks cannot run, what has no influence, and what depends on the layout by
    design; returns (flag, why) of what is lost by it.

    Raises:
        ValueError: nothing would be left of the layout.
    """
    for name in flags.matching(SHARDED):
        raise ValueError(f"{name}: fully sharded data parallelism does not run on CPU ranks")
    lost = []
    for name, why in ((name, LATER[key]) for key in LATER for name in flags.matching([key])):
        if not flags.neutral(name):
            lost.append((flags.text(name), why))
    flags.drop(*flags.of_kind(OUTSIDE))
    for kind, why in (
        *((GPU, "needs a GPU"), (PRECISION, "precision")),
        (OTHER, "it is of another task than pretraining"),
    ):
        for name in flags.of_kind(kind):
            lost.append((flags.text(name), why))
            flags.drop(name)
    for name in flags.of_kind(RANDOM):
        if not flags.neutral(name):
            lost.append((flags.text(name), RANDOM_BECAUSE[name]))
        flags.drop(name)
    for name, why in (
        (name, why) for key, why in NOT_KEPT.items() for name in flags.matching([key])
    ):
        lost.append((flags.text(name), why))
        flags.drop(name)
    for name, old, new, why in REPLACEMENTS:
        values = flags.values(name)
        if old in values:
            lost.append((f"{name} {old}", why))
            left = [new if value == old else value for value in values]
            flags.set(name, *filter(None, left))
            if old == "sinkhorn":
                flags.set("--moe-router-pre-softmax")  # which one expert a token asks for
            if not any(left):
                flags.drop(*flags.matching(("--recompute-",)))
    return lost
