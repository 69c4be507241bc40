"""Passes in pairs: their times, and the orders that ``join`` makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    AUTO,
    NAMES,
    Costs,
    Link,
    OffloadSpec,
    Placement,
    Schedule,
    ScheduleError,
    ScheduleSpec,
    check,
    generate,
    load,
    lower,
    save,
    select,
    simulate,
)
from megatron_ext.schedule.actions import Action, AnyAction, Joint, Op
from megatron_ext.schedule.bounds import lower_bound
from megatron_ext.schedule.effects import passes
from megatron_ext.schedule.memory_cap import ShareCap
from megatron_ext.schedule.passes.join import join
from tests.support.grids import KINDS, sampled

EXCHANGE = Costs.of("1.5", "1.5", 1).with_exchange([("0.5", "0.5")])
HOPS = Costs.of("1.5", "2", "0.75", "0.2").with_exchange([("0.75", "1")])
MUCH = Costs.of(3, 3, 1).with_exchange([(2, 2)])


def paired(name: str, pp: int, m: int, costs: Costs, chunks: int | None = None) -> Schedule:
    return join(generate(name, pp, m, chunks, costs))


def uneven(pp: int, chunks: int) -> Costs:
    """The first stage has no experts, the last one takes longest."""
    stages: list[Sequence[Fraction]] = [(Fraction(3), Fraction(4), Fraction(2))] * (pp * chunks)
    stages[0], stages[-1] = (Fraction(1),) * 3, (Fraction(5), Fraction(6), Fraction(3))
    sent = [(0, 0), *[(1, 2)] * (pp * chunks - 1)]
    return Costs.of(hop="0.5", stages=stages).with_exchange(sent)


def times_of(schedule: Schedule) -> Fraction:
    """The makespan by relaxation: every action starts when all that it waits for has ended."""
    d = schedule.costs.durations(schedule.placement)
    rank_of, n = schedule.placement.rank_of, schedule.placement.num_stages
    end: dict[tuple[Op, int, int], int] = {}
    finished = [[0] * len(row) for row in schedule.ranks]
    for _ in range(sum(map(len, schedule.ranks)) + 1):
        before = [list(row) for row in finished]
        for rank, row in enumerate(schedule.ranks):
            clock = 0
            for i, action in enumerate(row):
                needs = [clock]
                for op, stage, j in action.parts:
                    if op is Op.F and stage:
                        hop = d.hop * (rank_of(stage - 1) != rank_of(stage))
                        needs.append(end.get((Op.F, stage - 1, j), 0) + hop)
                    elif op in (Op.B, Op.BW):
                        needs.append(end.get((Op.F, stage, j), 0))
                        if stage + 1 < n:
                            hop = d.hop * (rank_of(stage + 1) != rank_of(stage))
                            needs.append(end.get((Op.B, stage + 1, j), 0) + hop)
                    elif op is Op.W:
                        needs.append(end.get((Op.B, stage, j), 0))
                parts = action.parts
                compute = sum(d.of(op, s) - d.exchange(op, s) for op, s, _ in parts)
                sent = sum(d.exchange(op, s) for op, s, _ in parts)
                took = max(compute, sent, *(d.of(op, s) for op, s, _ in parts))
                clock = finished[rank][i] = max(needs) + took
                for op, stage, j in parts:
                    end[Op.B if op is Op.BW else op, stage, j] = clock
        if finished == before:
            return Fraction(max(row[-1] for row in finished), d.scale)
    raise AssertionError("the order cannot progress")


class TestTimes:
    @pytest.mark.parametrize(
        ("exchange", "expected"),
        [((0, 0), 8), ((1, 1), 6), ((2, 1), 5), ((3, 3), 6), ((3, 5), 8), ((0, 5), 5)],
    )
    def test_a_pair(self, exchange: tuple[int, int], expected: int) -> None:
        """F 3 and B 5: computation beside communication, no faster than the longer pass."""
        costs = Costs.of(3, 5, 2).with_exchange([exchange])
        d = costs.durations(Placement.loop(2, 1))
        assert d.joint([(Op.F, 0), (Op.B, 1)]) == expected * d.scale
        sent = sum(exchange)
        assert d.joint([(Op.F, 0), (Op.BW, 1)]) == max(sent, 10 - sent, 7) * d.scale

    def test_chunks_share_it(self) -> None:
        d = EXCHANGE.durations(Placement.vee(2))
        assert [Fraction(x, d.scale) for x in d.exchange_forward] == [Fraction(1, 4)] * 4
        assert d.computation().exchange_forward == ()
        assert {Fraction(x, d.scale) for x in d.computation().forward} == {Fraction(1, 2)}
        assert d.times(3, 3 * d.scale).reduced() == d.reduced()

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([(2, 0)], "the exchange of stage 0 takes 2 of F and 0 of B, but they take 1.5"),
            ([(0, 0)] * 3, "given for 3 stages but there are 2"),
            ([(1,)], "the exchange needs two times F,B"),
            (["12"], "the exchange needs two times F,B"),
            ([(-1, 0)], "cost F of the exchange must be >= 0"),
        ],
    )
    def test_what_it_refuses(self, rows: list[tuple[int, ...]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            EXCHANGE.with_exchange(rows).durations(Placement.loop(2, 1))

    def test_none_changes_no_number(self) -> None:
        for name in ("dualpipev", "v-half", "interleaved"):
            plain = Costs.of(1, "1.2", "0.9", "0.1")
            one = generate(name, 4, 8, costs=plain)
            other = generate(name, 4, 8, costs=plain.with_exchange([(0, 0)]))
            assert one.ranks == other.ranks == join(other).ranks
            assert simulate(one).makespan == simulate(other).makespan
            assert simulate(one).hidden_exchange is None

    def test_what_is_hidden(self) -> None:
        """Of 4 passes with 1 of communication each, the pair's lies beside 3 of computation."""
        costs = Costs.of(2, 3, 1).with_exchange([(1, 1)])
        f, b = Action(Op.F, 0, 0), Action(Op.BW, 0, 0)
        row: list[AnyAction] = [f, Joint(Action(Op.F, 0, 1), b), Action(Op.BW, 0, 1)]
        other = [Action(op, 1, j) for j in (0, 1) for op in (Op.F, Op.BW)]
        schedule = Schedule("x", Placement.loop(2, 1), 2, (tuple(row), tuple(other)), costs)
        one, two = simulate(schedule).exchange
        assert (one.total, one.exposed) == (4, 2) and one.steady is not None
        assert (one.steady.total, one.steady.exposed) == (2, 0)
        assert (two.total, two.exposed) == (4, 4)
        assert simulate(schedule).hidden_exchange == Fraction(1, 4)
        assert simulate(schedule).makespan == times_of(schedule)


class TestOrders:
    @pytest.mark.parametrize("name", sampled(NAMES, KINDS))
    def test_they_keep_memory_and_gain(self, name: str) -> None:
        for pp, m, costs in ((2, 3, EXCHANGE), (3, 2, MUCH), (3, 7, HOPS), (4, 8, None)):
            chunks = generate(name, pp, 1).chunks
            used = uneven(pp, chunks) if costs is None else costs
            plain = generate(name, pp, m, costs=used, effort=0.02)
            made = join(plain)
            check(lower(made))
            before, after = simulate(plain), simulate(made)
            assert max(after.peak_sets) <= max(before.peak_sets) + 1
            assert after.makespan <= before.makespan
            assert after.makespan == times_of(made)
            bound = lower_bound(made.placement, m, used, fused=not made.splits_backward, pairs=True)
            assert bound.value <= after.makespan
            hidden = after.hidden_exchange
            assert hidden is not None and (hidden > 0) == made.has_pairs

    @pytest.mark.parametrize(("pp", "m", "chunks"), [(2, 6, 2), (3, 6, 2), (4, 16, 2), (3, 9, 3)])
    def test_interleaved_is_stocks_combined_1f1b(self, pp: int, m: int, chunks: int) -> None:
        """One more forward pass than interleaved before the first pair (Megatron's
        ``get_pp_rank_microbatches``), then an F and a BW in each slot."""
        plain = generate("interleaved", pp, m, chunks)
        rows = []
        for rank, row in enumerate(plain.ranks):
            forward = [a for a in passes(row) if a.op is Op.F]
            backward = [a for a in passes(row) if a.op is Op.BW]
            first = min(len(forward), 2 * (pp - rank - 1) + (chunks - 1) * pp + 1)
            slots: list[AnyAction] = [*map(Joint, forward[first:], backward)]
            rows.append([*forward[:first], *slots, *backward[len(slots) :]])
        stock = replace(plain.with_ranks(rows), costs=EXCHANGE)
        made = paired("interleaved", pp, m, EXCHANGE, chunks)
        assert made.ranks == stock.ranks

    @pytest.mark.parametrize("exchange", [Fraction(1, 4), Fraction(1, 2), Fraction(1)])
    def test_auto_is_as_fast_as_stocks_in_its_memory(self, exchange: Fraction) -> None:
        costs = Costs.of(1 + exchange, 1 + exchange, 1).with_exchange([(exchange, exchange)])
        stock = simulate(paired("interleaved", 4, 8, costs, 2))
        cap = ShareCap(max(stock.peak_activation) / 4)
        spec = ScheduleSpec(AUTO, 4, 8, costs=costs, overlap=True, cap=cap)
        assert select(spec).time <= stock.makespan

    def test_costs_times_three_give_the_same(self) -> None:
        one = paired("v-zb", 3, 8, HOPS)
        three = Costs.of("4.5", 6, "2.25", "0.6").with_exchange([("2.25", 3)])
        assert paired("v-zb", 3, 8, three).ranks == one.ranks

    def test_what_has_pairs_stays(self) -> None:
        made = paired("v-zb", 2, 6, EXCHANGE)
        assert made.has_pairs and join(made) is made
        assert "% of passes in pairs" in made.note

    def test_what_runs_between_passes_is_refused(self) -> None:
        spec = ScheduleSpec("v-half", 2, 4, costs=EXCHANGE, overlap=True)
        with pytest.raises(ValueError, match="pairs beside offload; leave out one of them"):
            select(replace(spec, offload=OffloadSpec("half", Link.parse(2, "0.5"))))
        with pytest.raises(ValueError, match="pairs beside a sharded vocabulary"):
            select(replace(spec, barriers=1))

    def test_auto_keeps_its_cap(self) -> None:
        spec = ScheduleSpec(AUTO, 2, 6, costs=EXCHANGE, overlap=True, cap=ShareCap(Fraction(1)))
        found = select(spec)
        assert max(simulate(found.schedule).peak_activation) <= 2
        alone = select(replace(spec, overlap=False))
        assert found.time < alone.time and found.schedule.has_pairs

    def test_files_keep_the_exchange(self, tmp_path: object) -> None:
        made = paired("v-zb", 2, 6, EXCHANGE)
        path = f"{tmp_path}/order.json"
        save(made, path)
        again = load(path)
        assert (again.ranks, again.costs) == (made.ranks, made.costs)
        text = json.loads(open(path).read())  # noqa: SIM115
        assert text["cost"]["exchange"] == [[0.5, 0.5]]
        for wrong in (1, [1], [["a", "b"]]):
            text["cost"]["exchange"] = wrong
            with open(path, "w") as file:
                json.dump(text, file)
            with pytest.raises(ScheduleError, match="exchange"):
                load(path)
