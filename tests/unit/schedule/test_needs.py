"""What a pass waits for, that few places know it, and that few files lead to an order."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from megatron_ext.schedule import Action, Costs, Op, Placement, generate
from megatron_ext.schedule.actions import Operation
from megatron_ext.schedule.costs import Durations
from megatron_ext.schedule.effects import CARRIED, KINDS, MESSAGES, inputs, results, users
from megatron_ext.schedule.generators import cap
from megatron_ext.schedule.tasks import sources
from megatron_ext.schedule.vocabulary import PASSES, Vocabulary, VocabularyOp
from tests.support import ROOT

NEEDS = {
    "F0": "",
    "F1": "F0",
    "F2": "F1",
    "B2": "F2",
    "B1": "F1 B2",
    "B0": "F0 B1",
    "W0": "B0",
    "W1": "B1",
    "W2": "B2",
}


def test_the_rule_of_three_stages() -> None:
    for text, needed in NEEDS.items():
        op, stage = Op(text[0]), int(text[1:])
        assert [f"{kind.value}{s}" for kind, s in inputs(op, stage, 3)] == needed.split()
        if op is Op.B:
            assert inputs(Op.BW, stage, 3) == inputs(op, stage, 3)
        behind = {f"{kind.value}{s}" for kind, s in users(op, stage, 3)}
        assert behind == {other for other, each in NEEDS.items() if text in each.split()}
    assert [results(op) for op in (*KINDS, Op.BW)] == [(Op.F,), (Op.B,), (Op.W,), (Op.B, Op.W)]
    assert not any(inputs(op, stage, 3) for op in PASSES for stage in range(3))


def test_messages_carry_what_another_stage_needs() -> None:
    """To whom the alphabet itself sends them; nobody else needs a W."""
    placement, sent = Placement.loop(3), set()
    for kind in KINDS:
        for stage in range(3):
            for _, other in users(kind, stage, 3):
                if other != stage:
                    send, receive = MESSAGES[kind]
                    peer = Action(send, stage, 0).peer(placement)
                    assert peer == (other, Action(receive, other, 0))
                    sent.add(kind)
    assert sent == set(MESSAGES) == set(CARRIED.values())


@pytest.mark.parametrize(
    ("op", "stage", "needed"),
    [
        (Op.F, 1, "F0+3"),
        (Op.F, 2, "F1+0"),  # of the same rank
        (Op.B, 1, "F1+0 B2+0"),
        (Op.F, 0, "E0+9 E1+9"),
        (Op.B, 3, "F3+0 S0+9 S1+9"),
        (VocabularyOp.E, 1, ""),
        (VocabularyOp.S, 1, "F3+9"),
        (VocabularyOp.T, 1, "B3+9"),
        (VocabularyOp.G, 1, "B0+9"),
    ],
)
def test_the_time_on_the_way(op: Operation, stage: int, needed: str) -> None:
    """A V of two ranks, a hop 3, a collective 9."""
    placement = Placement.vee(2)
    durations = Durations.unit(placement)._replace(hop=3, collective=9)
    found = sources(op, stage, placement, durations, Vocabulary(placement))
    assert " ".join(f"{kind.value}{other}+{lag}" for kind, other, lag in found) == needed


# How often a file says which stage is next; no other may, and none more often. The runtime's are
# the peers of messages.
STEPS = {"runtime/executor.py": 4, "schedule/effects.py": 3}


def steps(tree: ast.AST) -> Iterator[int]:
    """Lines that add 1 to a stage, or subtract it, in any order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            binary = isinstance(node, ast.BinOp)
            sides = {ast.unparse(node.left if binary else node.target).rpartition(".")[2]}
            sides.add(ast.unparse(node.right if binary else node.value).rpartition(".")[2])
            if sides == {"stage", "1"}:
                yield node.lineno


def test_few_places_know_which_stage_is_next() -> None:
    """Who needs it asks ``effects.inputs``, ``effects.users`` or ``tasks.sources``."""
    package = ROOT / "megatron_ext"
    found = {
        path.relative_to(package).as_posix(): list(steps(ast.parse(path.read_text())))
        for path in sorted(package.rglob("*.py"))
    }
    assert Counter({name: len(lines) for name, lines in found.items() if lines}) == STEPS, found


def test_a_step_is_seen_however_it_is_written() -> None:
    lines = ["stage + 1", "a.stage-1", "1 + action.stage", "stage += 1", "x[part.stage -1]"]
    other = ["stage * 1", "stage + 2", "stages + 1", "stage + one", "f(stage, 1)"]
    assert sorted(steps(ast.parse("\n".join(lines)))) == [1, 2, 3, 4, 5]
    assert not list(steps(ast.parse("\n".join(other))))


def imported(path: Path, folder: Path) -> Iterator[Path]:
    """Files of a folder that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for one in (base, *(base / name.name for name in node.names)):
                if one.with_suffix(".py").is_file() and folder in one.parents:
                    yield one.with_suffix(".py")


def test_what_makes_an_order_is_at_most_four_files_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """From ``generate``: its file, and three more; by what runs, and by what imports what."""
    # Without what earlier tests, and runs, have kept.
    monkeypatch.setattr(cap, "searched", inspect.unwrap(cap.searched))
    folder = ROOT / "megatron_ext" / "schedule"
    seen: set[str] = set()  # of a million calls

    def note(frame: FrameType, event: str, argument: object) -> None:
        seen.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        generate("v-half", 3, 19, costs=Costs.of(1, 2, "0.7", "0.1"), effort=0.001)
    finally:
        sys.setprofile(before)
    far = {folder / "generators" / "registry.py": 1}
    todo = list(far)
    for path in todo:
        for other in imported(path, folder):
            if other not in far:
                far[other] = far[path] + 1
                todo.append(other)
    used = {path for path in map(Path, seen) if folder in path.parents}
    assert {"moves.py", "longer.py", "tasks.py", "building_block.py"} <= {x.name for x in used}
    assert max(far[path] for path in used) <= 4
