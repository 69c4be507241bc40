"""Vocabulary passes of all ranks: inserted into any schedule, checked, lowered, in files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_ext.schedule import (
    GENERATORS,
    Costs,
    Link,
    Placement,
    ScheduleError,
    check,
    forward_only,
    generate,
    offload_pass,
    simulate,
)
from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.effects import inputs
from megatron_ext.schedule.generators.vocabulary import add_vocabulary
from megatron_ext.schedule.io import from_json
from megatron_ext.schedule.passes.lower import lower
from megatron_ext.schedule.vocabulary import AHEAD, E, G, S, T, VocabularyOp
from tests.support.grids import KINDS, sampled

NAMES = [name for name in GENERATORS if name != "dualpipev"]
HOP = Fraction(1, 20)
SMALL = ["0.25", "0.125", "0.01", "0.01", "0.02"]  # of a rank's F of 1
GRID = [(2, 3), (3, 7), (4, 8), (5, 6), (8, 16), (8, 5)]
FEW = [name for name in KINDS if name in NAMES]


def costs(vocabulary=SMALL, hop=HOP):
    return Costs.of(1, 1, 1, hop, vocabulary=vocabulary)


def made(name, pp, microbatches, **options):
    base = generate(name, pp, microbatches, costs=costs(**options))
    return base, add_vocabulary(base)


@pytest.mark.parametrize(("pp", "microbatches"), sampled(GRID, GRID[:2]))
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_takes_them(name, pp, microbatches):
    base, schedule = made(name, pp, microbatches)
    report = check(schedule)
    assert schedule.compute() == schedule and schedule.barriers == 1
    for row, own, plain in zip(schedule.ranks, schedule.placement.stages, base.ranks):
        kept = [action for action in row if isinstance(action.op, Op)]
        assert sorted(kept) == sorted(plain)
        for op in (S, T, E, G):
            every = [Action(op, own[0], j) for j in range(microbatches)]
            assert [action for action in row if action.op is op] == every
    before = simulate(base).peak_sets
    for sets, was in zip(report.peak_sets, before):
        assert sets <= was + base.chunks
    lowered = lower(schedule)
    check(lowered)
    assert from_json(json.loads(json.dumps(lowered.to_json()))) == replace(lowered, name=name)
    assert simulate(lowered).makespan == simulate(schedule).makespan


@pytest.mark.parametrize("counts", ["3", "1423"])
@pytest.mark.parametrize("name", sampled(NAMES, FEW))
def test_slices_have_their_own(name, counts):
    """In the order of their F's and B's; a pipeline of slices idles less than one of wholes."""
    slices = [int(n) for n in counts]
    base = generate(name, 4, 4, costs=costs(), slices=slices * (4 // len(slices)), effort=0)
    schedule = add_vocabulary(base, quick=True)
    check(schedule)
    units = schedule.units
    falling = sorted(units, key=lambda unit: (unit.microbatch, -unit.slice))
    for row, own in zip(schedule.ranks, schedule.placement.stages):
        for op, order in ((S, units), (E, units), (T, falling), (G, falling)):
            assert [a for a in row if a.op is op] == [Action(op, own[0], unit) for unit in order]
    more = Fraction(1, min(slices))
    before = base.peak_activation()
    assert all(a <= b + more for a, b in zip(schedule.peak_activation(), before))
    lowered = lower(schedule)
    check(lowered)
    assert from_json(json.loads(json.dumps(lowered.to_json()))) == replace(lowered, name=name)
    run = simulate(lowered)
    work = 4 * (3 + sum(map(Fraction, SMALL[:4])))
    assert run.bubble == 1 - work / run.makespan
    assert max(run.peak_vocabulary) <= 4 and run.peak_vocabulary[0] % Fraction(1, 12) == 0
    if slices == [3]:
        whole = add_vocabulary(generate(name, 4, 4, costs=costs(), effort=0), quick=True)
        assert run.makespan < simulate(whole).makespan


@pytest.mark.parametrize("name", sampled(NAMES, FEW))
def test_no_bubble_repeats(name):
    """Of eight more microbatches each takes what its passes do, as without vocabulary layers."""
    lengths = []
    for microbatches in (24, 32):
        base, schedule = made(name, 4, microbatches, hop=0)
        lengths.append([simulate(one).makespan for one in (base, schedule)])
    plain, sharded = (long - short for short, long in zip(*lengths))
    work = 8 * (3 + sum(map(Fraction, SMALL[:4])))
    assert sharded - work <= plain - 24 + work / 50


@pytest.mark.parametrize("name", sampled(NAMES, FEW))
def test_offload_beside_them(name):
    """Their order and times stay, also those of S, which the last stage's late F's must reach."""
    _, schedule = made(name, 4, 12)
    alone = simulate(schedule)
    plan = offload_pass(schedule, Link.of(4, "0.25"), "auto")
    lowered = lower(plan.schedule)
    report = check(lowered)
    check(plan.schedule)
    assert plan.schedule.compute() == schedule == lowered.compute() and not plan.stall
    assert sum(report.offloaded_sets) == sum(map(sum, plan.moved)) > 0
    assert sum(plan.peak_sets) < sum(alone.peak_sets)
    run = simulate(lowered)
    assert run.makespan == alone.makespan and run.transfers.stall == 0
    assert from_json(json.loads(json.dumps(lowered.to_json()))) == replace(lowered, name=name)


@pytest.mark.parametrize("name", sampled(NAMES, FEW))
def test_microbatches_between_s_and_t(name):
    """As many as overlap in simulated time; few, whatever the number of microbatches and ranks."""
    run = simulate(made(name, 5, 15)[1])
    for rank, peak in enumerate(run.peak_vocabulary):
        timed = list(zip(run.schedule.ranks[rank], run.start[rank], run.end[rank]))
        begins = [start for action, start, _ in timed if action.op is S]
        ends = [end for action, _, end in timed if action.op is T]
        assert peak == max(sum(b <= at < e for b, e in zip(begins, ends)) for at in begins)
        assert 1 <= peak <= 4
    assert simulate(forward_only(Placement.loop(2), 3, 1)).peak_vocabulary == [0, 0]


def test_copies_are_planned_for_times_that_can_be():
    """The last stage's F is no later than S needs it: then even all sets leave without a stall."""
    stages = [["2", "2", "2"], ["4", "4", "1"], ["1", "2", "1"], ["1", "2", "4"]]
    uneven = Costs.of(stages=stages, vocabulary=["1", "0.5", "0.1", "0.1", "2"])
    schedule = add_vocabulary(generate("v-min", 2, 4, costs=uneven))
    plan = offload_pass(schedule, Link.of(2, "0.05"), "full")
    assert plan.moved == [[4, 4], [4, 4]] and plan.stall == 0


def test_heavy_last_stage_against_all_ranks():
    """Output layer of four F's: all ranks have a part of it, and no rank is waited for."""
    stages = [["1", "1", "1"] for _ in range(7)] + [["5", "5", "5"]]
    heavy = simulate(generate("1f1b", 8, 32, costs=Costs.of(stages=stages))).makespan
    _, schedule = made("1f1b", 8, 32, vocabulary=["1", "0.5", "0.01", "0.01", "0"], hop=0)
    found = simulate(schedule)
    assert found.makespan < heavy / 2 and found.bubble < Fraction(1, 4)


def test_what_cannot_take_them():
    with pytest.raises(ScheduleError, match="no times of vocabulary passes"):
        add_vocabulary(generate("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match=r"F0\.\d\+BW.* cannot stand beside"):
        add_vocabulary(generate("dualpipev", 2, 8, costs=costs()))
    for times in (["1", "1"], ["1", "1", "0", "1"], ["1", "1", "1", "1", "-1"]):
        with pytest.raises(ValueError, match="vocabulary"):
            Costs.of(vocabulary=times)


def moved(schedule, rank, action, before):
    """``action`` of a rank right before another one."""
    row = [one for one in schedule.ranks[rank] if one != action]
    row.insert(row.index(before), action)
    ranks = [list(one) for one in schedule.ranks]
    ranks[rank] = row
    return schedule.with_ranks(ranks)


def of(text):
    return Action.parse(text)


@pytest.mark.parametrize(
    ("rank", "action", "before", "words"),
    [
        (0, "S0.0", "SHARE_X0.0", "S0.0 stands before SHARE_X0.0, whose result it needs"),
        (1, "JOIN_S1.0", "S1.0", "JOIN_S1.0 stands before S1.0"),
        (1, "SHARE_G1.1", "SHARE_X1.2", "collectives match in the order"),
        (0, "F0.0", "JOIN_E0.0", "F0.0 stands before JOIN_E0.0"),
        (0, "T0.0", "SHARE_D0.0", "T0.0 stands before SHARE_D0.0"),
        (1, "SHARE_D1.0", "BW1.0", "SHARE_D1.0 stands before BW1.0"),
        (1, "S1.1", "S1.0", "S1.0 comes after S1.1; the S passes of one chunk"),
        (0, "T0.1", "T0.0", "T0.0 comes after T0.1"),
        (1, "E1.2", "E1.1", "E1.1 comes after E1.2"),
        (0, "G0.1", "G0.0", "G0.0 comes after G0.1"),
    ],
)
def test_faults_of_collectives(rank, action, before, words):
    schedule = lower(made("1f1b", 2, 3)[1])
    check(schedule)
    with pytest.raises(ScheduleError, match=words):
        check(moved(schedule, rank, of(action), of(before)))


@pytest.mark.parametrize(
    "gone", ["S0.1", "T1.2", "E0.0", "G1.1", "SHARE_X0.2", "SHARE_D1.1", "JOIN_E1.0"]
)
def test_nothing_may_be_missing(gone):
    schedule = lower(made("1f1b", 2, 3)[1])
    ranks = [[action for action in row if str(action) != gone] for row in schedule.ranks]
    with pytest.raises(ScheduleError, match=rf"{gone.replace('.', '[.]')} is missing"):
        check(schedule.with_ranks(ranks))


def test_barriers_are_needed():
    schedule = lower(made("1f1b", 2, 3)[1])
    with pytest.raises(ScheduleError, match='needs "vocabulary_barriers": 1 in the file'):
        check(replace(schedule, barriers=0))


PLACEMENTS = [Placement.loop(1), Placement.loop(3), Placement.loop(2, 3), Placement.vee(4)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_forward_only(placement):
    """E two microbatches ahead of stage 0, S once a rank has had a pass to wait with."""
    for m in (1, 2, 5, 8):
        schedule = forward_only(placement, m, 1)
        lowered = lower(schedule)
        for one in (schedule, lowered, from_json(json.loads(json.dumps(lowered.to_json())))):
            assert check(one, forward_only=True).peak_sets == [0] * placement.pp
            assert one.is_forward_only and one.vocabulary.passes == (S, E)
        plain = forward_only(placement, m)
        for row, before, own in zip(schedule.ranks, plain.ranks, placement.stages):
            assert [a for a in row if a.op is Op.F] == list(before)
            for op in (E, S):
                every = [Action(op, own[0], j) for j in range(m)]
                assert [action for action in row if action.op is op] == every
        first = schedule.ranks[0]
        for j in range(m):
            ahead = min(j + AHEAD, m - 1)
            assert first.index(Action(E, 0, ahead)) < first.index(Action(Op.F, 0, j))
        found = {action.op.value for row in lowered.ranks for action in row}
        assert found - {"SEND_F", "RECV_F"} == {"F", "E", "S", "SHARE_X", "JOIN_S", "JOIN_E"}


def test_forward_only_hides_collectives():
    """As long as a pass takes, a collective delays none; the last ones come one by one."""
    placement, m = Placement.loop(4), 16
    schedule = forward_only(placement, m, 1)
    found = [
        simulate(schedule, Costs.of(vocabulary=["0.25", "0.25", "0.25", "0.25", latency])).makespan
        for latency in ("0", "0.9")
    ]
    # E of the first ones, m of all three, the way through the pipeline.
    assert found[0] <= m * Fraction(3, 2) + 3 + 1
    assert found[1] <= found[0] + 2 * Fraction(9, 10)


@pytest.mark.parametrize(
    ("action", "before", "words"),
    [
        ("T0.1", "F0.2", r"T0.1 is not needed: .* this forward-only schedule are S E"),
        ("G1.0", "F1.2", r"G1.0 is not needed: .* this forward-only schedule are S E"),
        ("B1.0", "F1.2", "B1.0 in a forward-only schedule, which holds no backward pass"),
        ("SHARE_D0.0", "F0.2", "SHARE_D0.0 is not needed in a forward-only"),
        ("SHARE_G1.0", "F1.2", "SHARE_G1.0 is not needed in a forward-only"),
        ("S1.1", "S1.0", "S1.0 comes after S1.1"),
        ("JOIN_S0.0", "S0.0", "JOIN_S0.0 stands before S0.0"),
        ("JOIN_E1.1", "E1.1", "JOIN_E1.1 stands before E1.1"),
        ("SHARE_X1.1", "SHARE_X1.0", "SHARE_X1.1 stands before F1.1"),
        ("JOIN_S0.0", "SHARE_X0.3", "JOIN_S1.0 stands where rank 0 has SHARE_X0.2"),
    ],
)
def test_faults_of_forward_only(action, before, words):
    schedule = lower(forward_only(Placement.loop(2), 4, 1))
    with pytest.raises(ScheduleError, match=words):
        check(moved(schedule, of(action).stage, of(action), of(before)), forward_only=True)
    for gone in ("S0.2", "E1.3", "SHARE_X1.0", "JOIN_S0.3", "JOIN_E1.2"):
        ranks = [[one for one in row if str(one) != gone] for row in schedule.ranks]
        with pytest.raises(ScheduleError, match=rf"{gone.replace('.', '[.]')} is missing"):
            check(schedule.with_ranks(ranks), forward_only=True)


def brute_force(schedule):
    """True if every list ends, where an action begins only once all that it needs has ended on
    its rank, and messages and collectives only where all who take part stand at them."""
    vocabulary, placement = schedule.vocabulary, schedule.placement
    at, done = [0] * schedule.pp, [set() for _ in schedule.ranks]

    def local(rank, action):
        """What of its own rank's list an action needs."""
        op, stage, j = action
        if op in (Op.RECV_F, Op.RECV_B):
            return []
        if op in (Op.SEND_F, Op.SEND_B):
            return [[Action(one, stage, j) for one in (Op.F,) * (op is Op.SEND_F) or (Op.B, Op.BW)]]
        if op.is_collective:
            own = [Action(one, s, j) for one, s in vocabulary.sources[op]]
            mine = [a for a in own if placement.rank_of(a.stage) == rank]
            return [[a, a._replace(op=Op.BW)] if a.op is Op.B else [a] for a in mine]
        needs = []
        if isinstance(op, Op):
            for kind, other in inputs(op, stage, placement.num_stages):
                if placement.rank_of(other) == rank:
                    ops = (kind, Op.BW) if kind is Op.B else (kind,)
                    needs.append([Action(one, other, j) for one in ops])
                else:
                    needs.append([Action(Op.RECV_B if kind is Op.B else Op.RECV_F, stage, j)])
        collective = vocabulary.before(op, stage)
        if collective is not None:
            needs.append([vocabulary.actions(collective, j)[rank]])
        return needs

    def ready(rank):
        row = schedule.ranks[rank]
        if at[rank] == len(row):
            return None
        action = row[at[rank]]
        each = local(rank, action)
        return action if all(any(one in done[rank] for one in some) for some in each) else None

    moving = True
    while moving:
        moving = False
        heads = [ready(rank) for rank in range(schedule.pp)]
        for rank, action in enumerate(heads):
            together = [rank]
            if action is None:
                continue
            if action.op.is_collective:
                key = action.op, action.microbatch
                together = list(range(schedule.pp))
                if any(h is None or (h.op, h.microbatch) != key for h in heads):
                    continue
            elif action.is_message:
                peer, matching = action.peer(placement)
                together = [rank, peer]
                if heads[peer] != matching:
                    continue
            for other in together:
                done[other].add(heads[other])
                at[other] += 1
            moving = True
            break
    return all(position == len(row) for position, row in zip(at, schedule.ranks))


CASES = [("1f1b", 2, 2), ("zb-h1", 3, 2), ("v-half", 2, 2), ("1f1b", 3, 3)]


@pytest.mark.parametrize("number", sampled((600, 10_000), (600,)))
def test_checker_agrees_with_brute_force(number):
    """Random orders that keep each chunk's microbatches in order: some run, some cannot."""
    numbers, verdicts = random.Random(5), [0, 0]
    good = [lower(made(*case)[1]) for case in CASES]
    good += [lower(forward_only(Placement.loop(p), m, 1)) for p, m in ((2, 3), (3, 3))]
    for _ in range(number):
        schedule = numbers.choice(good)
        ranks = [list(row) for row in schedule.ranks]
        for _ in range(numbers.choice((1, 1, 2, 3, 6))):
            row = numbers.choice(ranks)
            place = numbers.randrange(len(row) - 1)
            step = numbers.choice((1, 1, 2))
            if place + step < len(row):
                row[place], row[place + step] = row[place + step], row[place]
        if any(_out_of_order(row) for row in ranks):
            continue
        broken = schedule.with_ranks(ranks)
        try:
            check(broken, forward_only=schedule.is_forward_only)
            found = True
        except ScheduleError:
            found = False
        verdicts[found] += 1
        assert found == brute_force(broken), [" ".join(map(str, row)) for row in broken.ranks]
    assert min(verdicts) > number / 10, verdicts


def _out_of_order(row):
    """True if passes of one chunk are not in microbatch order, or a W stands before its B."""
    last = {}
    for op, stage, microbatch in row:
        if op.is_compute:
            for kind in op.value:
                if last.setdefault((kind, stage), -1) > microbatch:
                    return True
                last[kind, stage] = microbatch
        if op is Op.W and last.get(("B", stage), -1) < microbatch:
            return True
    return False


def test_operations_have_names_of_their_own():
    assert {op.value for op in VocabularyOp}.isdisjoint(op.value for op in Op)


def test_a_stage_with_split_and_whole_backward_passes() -> None:
    """As a file may have it: the passes are inserted, whatever the list schedules cannot order."""
    start = generate("zb-h1", 2, 4)
    rows = [[a for a in row if str(a) != "W0.1"] for row in start.ranks]
    rows[0] = [Action(Op.BW, 0, 1) if str(a) == "B0.1" else a for a in rows[0]]
    costs = replace(start.costs, vocabulary=tuple(map(Fraction, (1, 1, 1, 1, 0))))
    made = add_vocabulary(replace(start.with_ranks(rows), costs=costs))
    check(made)
    assert sum(a.op is S for row in made.ranks for a in row) == 2 * 4
