"""torch.distributed.pipelining's CSV form: both ways, columns, what is refused.

With torch itself: tests/ranks/schedule/test_csv.py.
"""

from __future__ import annotations

import re

import pytest

from megatron_ext.schedule.actions import Action, Op
from megatron_ext.schedule.effects import inputs
from megatron_ext.schedule.generators import NAMES, generate
from megatron_ext.schedule.io import from_csv, load, save, to_csv
from megatron_ext.schedule.passes.check import check
from megatron_ext.schedule.passes.lower import lower
from megatron_ext.schedule.schedule import ScheduleError

SIZES = [(2, 1), (3, 2), (4, 8)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_round_trip(tmp_path, name, pp, m):
    schedule = generate(name, pp, m)
    path = tmp_path / "s.csv"
    save(schedule, path)
    loaded = load(path)
    assert loaded.fingerprint() == schedule.fingerprint()
    assert loaded.name == "file"
    check(loaded)


def test_the_form():
    assert to_csv(generate("1f1b", 2, 2)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert to_csv(generate("zb-h1", 2, 1)) == "0F0,,,0I0,0W0\n,1F0,1I0,1W0,\n"


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_in_earlier_columns(name):
    """In torch's executor a column is a time step, and transfers arrive at its end."""
    schedule = generate(name, 4, 6)
    column_of = {}
    rows = [line.split(",") for line in to_csv(schedule).splitlines()]
    assert len({len(row) for row in rows}) == 1
    for row in rows:
        for column, cell in enumerate(row):
            if cell:
                column_of |= dict.fromkeys(map(_action, re.findall(r"\d+[FIWB]\d+", cell)), column)
    assert set(column_of) == {action for _, _, action in schedule.actions()}
    for action, column in column_of.items():
        op, stage, j = action
        for kind, other in inputs(op, stage, schedule.placement.num_stages):
            makers = (kind, Op.BW) if kind is Op.B else (kind,)
            assert any(column_of.get(Action(m, other, j), column) < column for m in makers)


def _action(cell):
    stage, letter, j = re.split("([FIWB])", cell)
    return Action({"F": Op.F, "I": Op.B, "W": Op.W, "B": Op.BW}[letter], int(stage), int(j))


def test_idle_cells_blanks_and_quotes_do_not_matter():
    text = ' 0F0 ,,,"0B0"\r\n,1F0,  ,1I0,1W0,,\n\n'
    loaded = from_csv(text)
    assert [[str(a) for a in row] for row in loaded.ranks] == [
        ["F0.0", "BW0.0"],
        ["F1.0", "B1.0", "W1.0"],
    ]
    assert (loaded.pp, loaded.chunks, loaded.microbatches) == (2, 1, 1)


def test_a_byte_order_mark_is_no_cell(tmp_path):
    path = tmp_path / "S.CSV"
    path.write_text(to_csv(generate("1f1b", 2, 1)), encoding="utf-8-sig")
    assert load(path).ranks == generate("1f1b", 2, 1).ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,,X\n", "row 2, column 3, cell 'X': expected stage, F, I, W or B"),
        ("0F0,0F\n", "row 1, column 2, cell '0F': expected"),
        ("0F0,0F-1\n", "row 1, column 2, cell '0F-1': expected"),
        ("0F0,0f1\n", "row 1, column 2, cell '0f1': expected"),
        ("0F0," + "9" * 5000 + "F0\n", "row 1, column 2, cell"),
        ("0F0,0SEND_F0\n", "cell '0SEND_F0': only compute actions can be imported"),
        ("0F0,(0F1;0F0)OVERLAP_F_B\n", "overlapped pairs as (0F3;7B1)OVERLAP_F_B"),
        ("0F0,0B0\n0F1,0B1\n", "row 2, column 1, cell '0F1': stage 0 is also in row 1"),
        ("0F0,,0F0\n", "row 1, column 3, cell '0F0': the same pass stands in row 1, column 1"),
        ("0F0\n2F0\n", "no row holds stage 1, but stages go up to 2"),
        ("0F0,1F0\n2F0\n", r"row 2 holds 1 stages [2], but row 1 holds 2 [0, 1]"),
        ("0F0\n,\n1F0\n", "row 2 holds 0 stages [], but row 1 holds 1 [0]"),
        ("", "the file holds no action"),
        (",,\n", "the file holds no action"),
        ("\x00\n0F0", "s.csv"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as error:
        load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_bytes_are_no_text(tmp_path):
    path = tmp_path / "s.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="is not text"):
        load(path)


def test_transfers_have_no_place(tmp_path):
    with pytest.raises(ScheduleError, match="has no transfers or offloads"):
        save(lower(generate("1f1b", 2, 1)), tmp_path / "s.csv")
