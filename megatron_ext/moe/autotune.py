"""Autotuner by trials: plans of the MoE layers, tried in training step by step; the fastest stays.

A step of training runs all its calls by one plan; so a forward pass that is repeated is cut as it
was, and Megatron's own layer can be one of the plans. Between steps the ranks of a group agree on a
``StepReport`` by a maximum, and everything here is a function of reports: all ranks take the same
decision. Plain Python; what touches devices and ranks is in the integration.

MPipeMoE searches n by trials with the number of tokens as its key (IPDPS, algorithm 1), but skips
trials by assuming one minimum; GEMM times rise in steps and have several, so here all plans that
fit the budget are tried. Megatron's own layer is the first of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .cost_file import Costs
from .plan import (
    Budget,
    BudgetError,
    LayerPlan,
    Strategy,
    simplest_first,
)

AUTO = "auto"
CHUNKS = (1, 2, 4, 8)  # among other numbers, GEMM times leave more local minima
LOOKAHEAD = 3  # besides 2 and n

SAMPLES = 4  # timed calls of a plan; the first one warms up
MOST_STEPS = 4  # of one plan's trial, however few calls they have
MARGIN = 0.02  # a plan must be faster than a simpler one by this
_NEVER = float("inf")  # the time of a trial without a clock
ORDER_GAIN = 0.1  # other orders are tried of plans that are slower than the fastest by less
RECHECK_STEPS, RECHECKED = 1000, 3  # then so many of the fastest plans are tried again


class SearchSpace(NamedTuple):
    """What may be chosen from; what a user fixes has one entry."""

    chunks: tuple[int, ...]
    strategies: tuple[Strategy, ...]

    @classmethod
    def of(cls, chunks: str | int = AUTO, strategy: str = AUTO) -> SearchSpace:
        """Within the flags' values; ``auto`` leaves a part free.

        Raises:
            ValueError: a number of chunks that is none, or an unknown strategy.
        """
        number = CHUNKS if chunks == AUTO else (LayerPlan.of(int(chunks)).chunks,)
        return cls(number, tuple(Strategy) if strategy == AUTO else (Strategy(strategy),))

    def plans(self) -> list[LayerPlan]:
        """All, in the paper's order of messages; the simplest first."""
        return simplest_first([LayerPlan(n, s) for n in self.chunks for s in self.strategies])


class StepReport(NamedTuple):
    """What a step showed of layers of one kind: of each number the most that any rank has.

    Attributes:
        tokens: of the first call of the step that begins.
        rows: that the busiest rank's experts had in a call so far; 0: not known.
        ms_per_token: median over the timed calls of the last step, forward and backward; 0: none
            was timed.
        samples: how many those were, with the first, which does not count where there are others.
    """

    tokens: float
    rows: float = 0
    ms_per_token: float = 0
    samples: float = 0


@dataclass
class _Trial:
    """A plan that is being timed, for a bucket; ``least`` in milliseconds a token."""

    least: float = _NEVER
    samples: float = 0
    steps: int = 0


def bucket(tokens: float) -> int:
    """Numbers in one bucket differ by an eighth at most; larger ones have larger buckets."""
    number = max(int(tokens), 1)
    octave = number.bit_length() - 1
    return octave * 8 + ((number * 8) >> octave) - 8


def largest(number: int) -> int:
    """The most tokens of a bucket."""
    octave, eighth = divmod(number, 8)
    # Where an octave has fewer than eight numbers, some of its buckets are empty.
    return max(1, (((9 + eighth) << octave) - 1) // 8)


class Tuner:
    """Chooses the plan of each step for the layers of one kind.

    Args:
        space: what may be chosen; where it has one chunk and none, Megatron's own layer is a
            candidate as any other.
        budget: of the rank's MoE layers; None: no limit, and then nothing is restored that need
            not be.
        costs: of the same layers: times of an earlier run are not taken again.
        log: takes a line for people, at every change of a decision.

    Attributes:
        plan: of the step.
        on_trial: whether its calls are to be timed.
        costs: with the times of this run.
    """

    def __init__(
        self,
        space: SearchSpace,
        budget: Budget | None,
        costs: Costs,
        log: Callable[[str], None],
    ) -> None:
        self._plans, self._budget, self._log = space.plans(), budget, log
        times = {n: dict(found) for n, found in costs.times.items()}
        self.costs = replace(costs, times=times)
        self.plan, self.on_trial = self._plans[0], False
        self._trials: dict[tuple[int, LayerPlan], _Trial] = {}  # that are not over
        self._rows = self._seen_rows = 0
        self._chosen: dict[int, tuple[LayerPlan, int]] = {}  # by bucket, with its steps
        self._calls: Counter[tuple[LayerPlan, int]] = Counter()
        self._bucket = -1

    @property
    def finest(self) -> int:
        """As an ``ExecutionPolicy``: more rows than expected may need the most chunks."""
        plans = [self.plan] if self._budget is None else self._plans
        return max(plan.chunks for plan in plans)

    @property
    def expected(self) -> int:
        """As an ``ExecutionPolicy``: the step's plan's."""
        return self.plan.chunks

    def plan_for(self, rows: int) -> LayerPlan:
        """As an ``ExecutionPolicy``: the step's plan, or one that keeps the budget where more rows
        arrive than it was chosen for."""
        budget, self._seen_rows = self._budget, max(rows, self._seen_rows)
        if budget is None or budget.fits(self.plan, max(rows, self._rows)):
            return self.plan
        self.on_trial = False
        return budget.least(self._plans, rows)

    def count_call(self) -> None:
        """A call runs by the step's plan."""
        self._calls[self.plan, self._bucket] += 1

    def begin_step(self, report: StepReport) -> None:
        """Choose for a step, after the last one's report; the same on all ranks.

        Before the first step there is only an expectation of tokens and rows. With a budget it
        then takes what needs least, as routing may be uneven.
        """
        first = self._bucket < 0
        self._record(report)
        seen = max(report.rows, self._seen_rows)
        rows = max(self._rows, largest(bucket(seen)))  # headroom of an eighth
        grown, self._rows = rows > self._rows, rows
        self._bucket = bucket(report.tokens)
        times = self.costs.times.setdefault(largest(self._bucket), {})
        fitting = self._fitting(grown and not first)
        if not times and not any(number == self._bucket for number, _ in self._trials):
            every = dict.fromkeys(p for plan in fitting for p in (plan, *self._other_orders(plan)))
            if first and self._budget is not None:
                fitting = [self._budget.least(self._plans, rows)]
            self._log_start(len(every | dict.fromkeys(fitting)))
        self._recheck(times)
        untried = self._untried(fitting, times)
        self.on_trial, fastest = untried is not None, self._fastest(fitting, times)
        self.plan = fastest if untried is None else untried
        if untried is None:
            self._choose(fastest)
        else:
            self._trials.setdefault((self._bucket, untried), _Trial())

    # --- trials ---

    def _record(self, report: StepReport) -> None:
        key = self._bucket, self.plan
        trial = self._trials.get(key)
        if trial is None or not self.on_trial:
            return
        trial.steps += 1
        trial.samples += report.samples
        # The only call of a first step pays for what is loaded and allocated once.
        if report.ms_per_token and (report.samples > 1 or trial.steps > 1):
            trial.least = min(trial.least, report.ms_per_token)
        if trial.samples >= SAMPLES or trial.steps >= MOST_STEPS:
            self.costs.times.setdefault(largest(self._bucket), {})[self.plan] = trial.least
            del self._trials[key]

    def _log_start(self, most: int) -> None:
        if most > 1:
            self._log(
                f"up to {largest(self._bucket)} tokens a rank: trying at most {most} plans, a step "
                f"each; decided within {most} steps, or {MOST_STEPS * most} where a step has few "
                "calls"
            )

    def _fitting(self, report_excess: bool) -> list[LayerPlan]:
        """Plans of the paper's order that keep the budget, the simplest first."""
        plans, budget = self._plans, self._budget
        if budget is not None:
            plans = [plan for plan in plans if budget.fits(plan, self._rows)]
            if not plans:
                # Routing can send a rank more rows than anyone planned for; that ends no training.
                plans = [budget.least(self._plans, self._rows)]
                if report_excess:
                    self._log_excess(budget)
        # s0 does all that keeping does, and an activation function more; the others do far more.
        # So of each number of chunks what comes behind the first of these two that fits, in the
        # order of messages that needs most, is not tried. One chunk with none is Megatron's own
        # layer, where nothing computes beside the last message as it does in ours.
        first: dict[int, Strategy] = {}
        for plan in plans:
            deepest = plan._replace(lookahead=plan.chunks)
            keeps = plan.strategy in (Strategy.NONE, Strategy.S0) and not plan.stock
            if keeps and self.allows(deepest):
                first.setdefault(plan.chunks, plan.strategy)
        order = list(Strategy)
        return [
            plan
            for plan in plans
            if plan.chunks not in first
            or order.index(plan.strategy) <= order.index(first[plan.chunks])
        ]

    def _log_excess(self, budget: Budget) -> None:
        try:
            budget.require(self._plans, self._rows)
        except BudgetError as error:
            self._log(f"up to {self._rows} rows on a rank: {error}; training goes on")

    def _untried(
        self, fitting: Sequence[LayerPlan], times: dict[LayerPlan, float]
    ) -> LayerPlan | None:
        """The next plan to time: all in the paper's order, then other orders of the fastest."""
        known = {one: time for one, time in times.items() if time < _NEVER}
        least = min((known[plan] for plan in known if self.allows(plan)), default=0.0)
        best: dict[LayerPlan, float] = {}  # of any order of a plan
        for one, time in known.items():
            paper = one._replace(lookahead=2)
            best[paper] = min(time, best.get(paper, time))
        near = [p for p in fitting if best.get(p, times.get(p, 0.0)) <= (1 + ORDER_GAIN) * least]
        orders = (order for plan in near for order in self._other_orders(plan))
        return next((plan for plan in (*fitting, *orders) if plan not in times), None)

    def _other_orders(self, plan: LayerPlan) -> list[LayerPlan]:
        """The same with other orders of messages, within the budget."""
        numbers = sorted({LOOKAHEAD, plan.chunks})
        deeper = [plan._replace(lookahead=n) for n in numbers if 2 < n <= plan.chunks]
        return [one for one in deeper if self.allows(one)]

    def allows(self, plan: LayerPlan) -> bool:
        """True if ``plan`` keeps the budget, with the most rows so far."""
        return self._budget is None or self._budget.fits(plan, self._rows)

    def _fastest(self, fitting: Sequence[LayerPlan], times: dict[LayerPlan, float]) -> LayerPlan:
        """Of the plans that were timed and fit, the simplest within a margin of the fastest."""
        timed = [p for p in simplest_first(list(times)) if self.allows(p) and self._in_space(p)]
        if not timed:
            return fitting[0]
        least = min(times[plan] for plan in timed)
        return next(plan for plan in timed if times[plan] <= least * (1 + MARGIN))

    def _in_space(self, plan: LayerPlan) -> bool:
        return plan._replace(lookahead=2) in self._plans

    def _recheck(self, times: dict[LayerPlan, float]) -> None:
        """Routing changes over a run: after many steps the fastest plans are tried again."""
        if self._chosen.get(self._bucket, (None, 0))[1] >= RECHECK_STEPS:
            for plan in sorted(times, key=times.__getitem__)[:RECHECKED]:
                del times[plan]
            times.pop(self._plans[0], None)  # stock's layer, where it is a candidate
            self._chosen[self._bucket] = (self._chosen[self._bucket][0], 0)

    # --- what people read ---

    def _choose(self, plan: LayerPlan) -> None:
        before, steps = self._chosen.get(self._bucket, (None, 0))
        self._chosen[self._bucket] = plan, steps + 1
        if plan != before:
            self._log(
                f"up to {largest(self._bucket)} tokens a rank: {self._text(plan, self._bucket)}"
            )
            self._log(f"for --moe-pipeline-costs: {self.costs.dump()}")

    def _text(self, plan: LayerPlan, number: int) -> str:
        tokens, text = largest(number), str(plan)
        times = self.costs.times.get(tokens, {})
        for name, one in (("a call takes", plan), ("Megatron's own layer", LayerPlan())):
            if times.get(one, _NEVER) < _NEVER and (one != plan or name == "a call takes"):
                text += f"; {name} {times[one] * tokens:.3f} ms"
        if self._budget is not None:
            nbytes = self._budget.footprint(plan, self._rows).peak_bytes
            text += f"; {nbytes} bytes predicted for {self._rows} rows"
        return text

    def summary(self) -> list[str]:
        """What ran how often: a line for each plan."""
        plans: dict[LayerPlan, list[tuple[int, int]]] = {}
        for (plan, number), calls in self._calls.items():
            plans.setdefault(plan, []).append((calls, number))
        found = [f"for --moe-pipeline-costs: {self.costs.dump()}"] if not self._chosen else []
        return found + [
            f"{sum(calls for calls, _ in used)} calls, most of them with up to "
            f"{largest(max(used)[1])} tokens a rank: {self._text(plan, max(used)[1])}"
            for plan, used in sorted(plans.items(), key=lambda one: -sum(n for n, _ in one[1]))
        ]
