"""The numbers of a simulated schedule, each once: field of JSON, column of a table, line of text.

``simulate``, ``schedule`` and ``compare`` print views of this one list. A new number
is a new entry, and its name in the views that show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from ..schedule import Simulation
from ..schedule.costs import number_to_json
from ..view import page, timeline
from .quality import Gap, percent
from .results import cost_json, per_rank
from .results import short as short


@dataclass(frozen=True)
class Shown:
    """One schedule's run, with what was asked of it.

    Attributes:
        run: of the schedule.
        gap: to the bound; None without backward passes.
        seconds: to make it, or to read a file.
        offloads: offload was asked for, even if no set leaves.
        before: the highest peak without offload, in microbatches; None: not asked for.
        over_cap: more stays on a device than the cap or the GPU allows; None: there is no cap.
    """

    run: Simulation
    gap: Gap | None
    seconds: float = 0.0
    offloads: bool = False
    before: Fraction | None = None
    over_cap: bool | None = None

    @property
    def peak(self) -> Fraction:
        """Of the fullest rank, in microbatches."""
        return max(self.run.peak_activation)

    @property
    def host_peak(self) -> Fraction:
        """Likewise, on the host."""
        return max(self.run.peak_host_activation)

    @property
    def offloaded(self) -> tuple[int, Fraction]:
        """Sets of all ranks, and the makespan's part that waits for them."""
        transfers = self.run.transfers
        return (transfers.sets, transfers.stall) if transfers else (0, Fraction(0))


class Number(NamedTuple):
    """One number.

    Attributes:
        field: its value in JSON; None: it is in none.
        head, cell: of its column.
        label, text: of its line; a label that begins with blanks is below another.
        there: whether a run has it.
    """

    field: Callable[[Shown], Any] | None = None
    head: str = ""
    cell: Callable[[Shown], str] = lambda s: ""
    label: str = ""
    text: Callable[[Shown], str] = lambda s: ""
    there: Callable[[Shown], bool] = lambda s: True


def _name(s: Shown) -> str:
    return s.run.schedule.name


def _share(x: Fraction) -> str:
    return f"{float(100 * x):.2f} %"


def _above(s: Shown) -> str:
    return "-" if s.gap is None else _share(s.gap.above)


def _hidden(s: Shown) -> str:
    steady = s.run.hidden_steady
    worst = max(s.run.exchange, key=lambda one: one.exposed)
    between = "" if steady is None else f", {percent(steady)} between first B and last F"
    return (
        f"{percent(s.run.hidden_exchange or Fraction(0))} hidden{between}; "
        f"{short(worst.exposed)} of {short(worst.total)} not, on the worst rank"
    )


def _number(value: Fraction | None) -> int | float | None:
    return None if value is None else number_to_json(value)


def _each(values: Sequence[Fraction]) -> list[int | float]:
    return [number_to_json(x) for x in values]


def _arranged(s: Shown) -> bool:
    return s.run.schedule.arrangement is not None


def _saved(s: Shown) -> str:
    found = s.run.schedule.arrangement
    return "-" if found is None or found.saved is None else percent(found.saved)


def _bounded(s: Shown) -> bool:
    return s.gap is not None


def _exchanges(s: Shown) -> bool:
    return s.run.hidden_exchange is not None


def _copies(s: Shown) -> bool:
    return s.offloads or s.run.transfers is not None


# By name, in the order of JSON.
NUMBERS: dict[str, Number] = {
    "schedule": Number(_name, "schedule", _name),
    "pp": Number(lambda s: s.run.schedule.pp),
    "chunks": Number(
        *(lambda s: s.run.schedule.chunks, "chunks", lambda s: str(s.run.schedule.chunks))
    ),
    "microbatches": Number(lambda s: s.run.schedule.microbatches),
    "slices": Number(
        lambda s: s.run.schedule.slices_json,
        *("slices", lambda s: str(max(s.run.schedule.slices, default=1))),
        there=lambda s: bool(s.run.schedule.slices),
    ),
    "microbatch_order": Number(
        lambda s: s.run.schedule.arrangement_json["microbatch_order"],
        label="microbatches",
        text=lambda s: str(s.run.schedule.arrangement),
        there=_arranged,
    ),
    "saved_by_order": Number(
        lambda s: s.run.schedule.arrangement_json["saved_by_order"],
        *("by order", _saved),
        there=_arranged,
    ),
    "cost": Number(lambda s: cost_json(s.run.schedule.costs)),
    "makespan": Number(
        lambda s: number_to_json(s.run.makespan),
        *("makespan", lambda s: short(s.run.makespan)),
        *("makespan", lambda s: short(s.run.makespan)),
    ),
    "bubble": Number(
        lambda s: number_to_json(s.run.bubble),
        *("bubble", lambda s: _share(s.run.bubble)),
        *("bubble", lambda s: f"{short(100 * s.run.bubble)} %"),
    ),
    "span_bubble": Number(
        lambda s: number_to_json(s.run.span_bubble),
        label="span bubble",
        text=lambda s: f"{short(100 * s.run.span_bubble)} %",
    ),
    "peak_activation": Number(
        lambda s: _each(s.run.peak_activation),
        *("peak", lambda s: short(s.peak)),
        *("  per rank", lambda s: per_rank(s.run.peak_activation)),
    ),
    "peak_activation_vs_1f1b": Number(
        lambda s: number_to_json(s.peak / s.run.schedule.pp),
        *("of 1F1B's", lambda s: f"{float(100 * s.peak / s.run.schedule.pp):.1f} %"),
        "peak activation",
        lambda s: (
            f"{short(s.peak)} microbatches, {short(100 * s.peak / s.run.schedule.pp)} % of "
            f"1F1B's {s.run.schedule.pp}"
        ),
    ),
    "peak_vocabulary_microbatches": Number(
        lambda s: _each(s.run.peak_vocabulary),
        label="kept from S to T",
        text=lambda s: f"{short(max(s.run.peak_vocabulary))} microbatches",
        there=lambda s: bool(s.run.schedule.barriers),
    ),
    "vocabulary per rank": Number(
        label="  per rank",
        text=lambda s: per_rank(s.run.peak_vocabulary),
        there=lambda s: bool(s.run.schedule.barriers),
    ),
    "exchange": Number(
        lambda s: _each([one.total for one in s.run.exchange]),
        label="exchange",
        text=_hidden,
        there=_exchanges,
    ),
    "exposed_exchange": Number(
        lambda s: _each([one.exposed for one in s.run.exchange]), there=_exchanges
    ),
    "hidden_exchange": Number(
        lambda s: _number(s.run.hidden_exchange),
        *("hidden", lambda s: percent(s.run.hidden_exchange or Fraction(0))),
        there=_exchanges,
    ),
    "hidden_exchange_steady": Number(lambda s: _number(s.run.hidden_steady), there=_exchanges),
    "generation_seconds": Number(
        lambda s: round(s.seconds, 6), label="generated in", text=lambda s: f"{s.seconds:.3f} s"
    ),
    "lower_bound": Number(
        lambda s: s.gap and number_to_json(s.gap.bound),
        label="bound",
        text=lambda s: s.gap.text if s.gap else "",
        there=_bounded,
    ),
    "bound_kind": Number(lambda s: s.gap and s.gap.kind, there=_bounded),
    "above_bound": Number(lambda s: s.gap and number_to_json(s.gap.above), there=_bounded),
    "above bound": Number(head="above bound", cell=_above),
    "peak_host_activation": Number(
        lambda s: _each(s.run.peak_host_activation),
        *("host peak", lambda s: short(s.host_peak)),
        "  host peak",
        lambda s: (
            f"{short(s.host_peak)} microbatches; per rank {per_rank(s.run.peak_host_activation)}"
        ),
        there=_copies,
    ),
    "offloaded_sets": Number(
        lambda s: s.offloaded[0],
        *("offloaded", lambda s: str(s.offloaded[0])),
        "offloaded",
        lambda s: f"{s.offloaded[0]} activation sets, stall {short(s.offloaded[1])}",
        there=_copies,
    ),
    "offload_stall": Number(
        lambda s: number_to_json(s.offloaded[1]),
        *("stall", lambda s: short(s.offloaded[1])),
        there=_copies,
    ),
    "note": Number(lambda s: s.run.schedule.note, there=lambda s: bool(s.run.schedule.note)),
    "peak_activation_without_offload": Number(
        lambda s: _number(s.before),
        *("without", lambda s: short(s.before or Fraction(0))),
        there=lambda s: s.before is not None,
    ),
    "over_cap": Number(lambda s: s.over_cap, there=lambda s: s.over_cap is not None),
}

_MEMORY = ("peak_activation", "peak_activation_vs_1f1b")
_OFFLOAD = ("peak_activation_without_offload", "peak_host_activation", "offloaded_sets")
COLUMNS = (
    *("schedule", "chunks", "slices", "bubble", "makespan", "above bound"),
    "saved_by_order",
    *(*_MEMORY, *_OFFLOAD, "offload_stall", "hidden_exchange"),
)
LINES = (
    *("makespan", "lower_bound", "bubble", "span_bubble"),
    *("peak_activation_vs_1f1b", "peak_activation", "microbatch_order", "exchange"),
    *(
        "peak_vocabulary_microbatches",
        "vocabulary per rank",
        "offloaded_sets",
        "peak_host_activation",
        "generation_seconds",
    ),
)


def json_of(shown: Shown) -> dict[str, Any]:
    """The contract's object, with a ``note`` where ``auto`` or the offload pass says why."""
    return {
        name: number.field(shown)
        for name, number in NUMBERS.items()
        if number.field is not None and number.there(shown)
    }


def table_of(rows: Sequence[Shown]) -> list[tuple[str, ...]]:
    """Heads and cells of the numbers that any row has."""
    found = [NUMBERS[name] for name in COLUMNS if any(NUMBERS[name].there(row) for row in rows)]
    return [
        tuple(number.head for number in found),
        *(tuple(number.cell(row) for number in found) for row in rows),
    ]


def page_of(rows: Sequence[Shown]) -> str:
    """The table and every timeline as one HTML page."""
    runs = [timeline.planned(row.run) for row in rows]
    return page.render(*runs, rows=table_of(rows))


def lines_of(shown: Shown) -> list[str]:
    """Text, a line a number."""
    found = [NUMBERS[name] for name in LINES if NUMBERS[name].there(shown)]
    return [f"  {number.label:<17}{number.text(shown)}" for number in found]
