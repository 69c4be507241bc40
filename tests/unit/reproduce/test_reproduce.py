"""The papers' rows: rules that can fail, complete data, and a page that is up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli import main
from megatron_ext.commands.reproduce import write_page
from megatron_ext.reproduce import render
from megatron_ext.reproduce.jobs import sharded, vocabulary_mfu
from megatron_ext.reproduce.orders import Device, Recipe
from megatron_ext.reproduce.papers import PAPERS, sections, wanted
from megatron_ext.reproduce.quantities import gain, in_order, over, pairs_in_order
from megatron_ext.reproduce.rows import (
    UNEXPLAINED,
    Cell,
    Kind,
    Paper,
    Table,
    judged,
    published,
)
from megatron_ext.schedule.generators import pairs
from tests.support import ROOT

PAGE = ROOT / "docs" / "reference/papers.md"
# Tables that take a second or two; the others are for ``campaign``.
FAST = {"k", "fig16", "table1", "phi", "saving", "granularity", "speedup", "table2", "appendix"}
FAST |= {"stock", "idle", "half"}
FIELDS = {"paper", "table", "row", "published", "ours", "unit", "verdict", "source"}


def judge(kind: Kind, value: Any, ours: Any, digits: int = 0) -> str:
    """The verdict on one cell of a table with a reason upwards only."""
    table = Table("k", "", "k", kind, "", lambda: [], above="of the weather")
    return judged(PAPERS[0], table, Cell("row", value, ours, digits)).verdict


@pytest.mark.parametrize(
    ("kind", "value", "ours", "verdict"),
    [
        (Kind.EXACT, 54, 54.4, "reproduced"),
        (Kind.EXACT, 54, 54.6, "differs because of the weather"),
        (Kind.EXACT, "fits", "fits", "reproduced"),
        (Kind.EXACT, "fits", "out of memory", "differs because of the weather"),
        (Kind.ORDER, 100, 101, "reproduced"),
        (Kind.ORDER, 100, 101.1, "differs because of the weather"),
        (Kind.ORDER, 100, 98.9, "better"),
        (Kind.ORDER, 0, 1, "differs because of the weather"),
        (Kind.BYTES, 3, 3.5, "reproduced"),
        (Kind.BYTES, 3, 3.6, "differs because of the weather"),
        (Kind.BYTES, 50, 44, UNEXPLAINED),
        (Kind.TIME, 50, 55, "reproduced"),
        (Kind.TIME, 50, 44.9, UNEXPLAINED),
        (Kind.TIME, (45, 57), 50, "reproduced"),
        (Kind.TIME, (45, 57), 62.8, "differs because of the weather"),
        (Kind.GAIN, 16, 10.7, "reproduced"),
        (Kind.GAIN, 16, 10.6, UNEXPLAINED),
        (Kind.GAIN, -7.4, 0, "differs because of the weather"),
        (Kind.GAIN, 0.3, 2.2, "reproduced"),
        (Kind.MEASURED, "2.8", None, "needs a GPU"),
    ],
)
def test_a_verdict_follows_from_the_kind(kind: Kind, value: Any, ours: Any, verdict: str) -> None:
    assert judge(kind, value, ours) == verdict


def test_differences_are_relative_or_in_points() -> None:
    def of(kind: Kind, value: Any, ours: float) -> float | None:
        table = Table("k", "", "k", kind, "", lambda: [])
        return judged(PAPERS[0], table, Cell("row", value, ours)).difference

    assert of(Kind.TIME, 50, 55) == pytest.approx(10)
    assert of(Kind.GAIN, 50, 55) == 5
    assert of(Kind.GAIN, (12, 19), 5) == -7
    assert of(Kind.ORDER, 0, 2) is None


def test_pairs_in_order() -> None:
    assert pairs_in_order([(1, 10), (2, 20), (2, 30), (3, 25)]) == (4, 5)
    assert pairs_in_order([(1, 5), (2, 5)]) == (0, 1), "a tie is not in order"


def test_rows_are_derived_of_those_of_their_setup() -> None:
    cells = [Cell("a, x", 2, 3), Cell("b, x", 1, 1), Cell("a, y", 4, 9), Cell("b, y", 1, 2)]
    assert list(over(cells, "x")) == [Cell("a, y", 2, 3), Cell("b, y", 1, 2)]
    assert list(gain(cells, "x")) == [Cell("a: y over x", 100, 200), Cell("b: x over x", 0, 0)]
    assert list(in_order(cells, "x")) == [Cell("a", 1, 1)], "of b no pair has an order"


def test_what_several_tables_say_is_written_once() -> None:
    text = (ROOT / "megatron_ext/reproduce/compared.json").read_text()
    for name in json.loads(text)["shared"]:
        assert text.count(f'{{"same": "{name}"}}') > 1, name


def every() -> Iterator[tuple[Paper, Table]]:
    return ((paper, table) for paper in PAPERS for table in paper.tables)


def test_all_published_tables_are_compared() -> None:
    for paper in PAPERS:
        assert {table.key for table in paper.tables} == set(paper.data["tables"])
        for entry in paper.data["tables"].values():
            assert entry["source"] and entry["certainty"]
    assert {paper.name for paper in PAPERS} == set(published())
    for _, table in every():
        assert table.assumptions or table.kind is Kind.MEASURED, table.name
    names = [(paper.name, table.name) for paper, table in every()]
    assert len(names) == len(set(names))


def test_figure_15_is_complete() -> None:
    """As the figure: 42 numbers, 20 cells out of memory, 4 skipped."""
    cells = [c for row in published()["pipeoffload"]["tables"]["fig15"]["rows"] for c in row[2]]
    assert sum(isinstance(cell, list) for cell in cells) == 42
    assert (cells.count(None), cells.count("skip")) == (20, 4)


def test_tables_of_vocabulary_parallelism() -> None:
    """As printed: four vocabularies' MFU and GB of every method; and one cell of ours."""
    tables = published()["vocabulary-parallelism"]["tables"]
    rows = [v for t in tables.values() for methods in t["rows"].values() for v in methods.values()]
    assert len(rows) == 4 * 4 + 2 * 2 and {len(values) for values in rows} == {8}
    largest = tables["table5"]["rows"]["8x2048"]
    assert largest["Vocab-2"][3] / largest["Baseline"][3] == pytest.approx(1.97, abs=0.01)
    found = {m: sharded("1f1b", 8, 2048, 256, m) for m in ("Baseline", "Vocab-1", "Vocab-2")}
    for method, point in found.items():
        assert point.worst.total / 2**30 == pytest.approx(largest[method][7], rel=0.1)
    # Two barriers keep a microbatch more.
    assert found["Vocab-2"].worst.total < found["Vocab-1"].worst.total
    assert 1.9 * vocabulary_mfu(found["Baseline"]) < vocabulary_mfu(found["Vocab-2"]) < 100
    with_shards = found["Vocab-2"].workload.job
    assert with_shards.vocab_parallel and found["Vocab-2"].spec.barriers == 1


def test_dualpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, at F&B = F + B: its order has that bubble, and ours with pairs has less."""
    monkeypatch.setattr(pairs, "_WORK", 60_000)  # finds it, too
    rows = published()["dualpipe"]["tables"]["comparison"]["rows"]
    assert [rows[name]["parameters"] for name in ("ZB1P", "DualPipe", "DualPipeV")] == [1, 2, 2]
    none, half = Fraction(0), Fraction(1, 2)
    assert Device("1F1B", 8, none, paired=False).idle() == 7 * 3
    assert Device("ZB1P", 8, none, paired=False).idle() == 7 * 1
    assert Device("DualPipeV", 8, none, paired=False).idle() == 3 * (3 + 2 - 3)
    # With half a pass of communication F&B takes as long as its computation.
    assert Device("DualPipeV", 8, half, paired=False).idle() == 3 * (3 + 2.5 - 3)
    ours = Device("DualPipeV", 8, half, paired=True)
    assert 0 < ours.idle() < 7.5
    assert ours.simulated.schedule.has_pairs and max(ours.simulated.peak_sets) <= 9


def fast() -> list[tuple[Paper, Table]]:
    return [
        (paper, table)
        for paper, table in every()
        if table.kind is Kind.MEASURED or {table.name, table.name.split("-")[0]} & FAST
    ]


def test_the_page_has_the_fast_tables_of_today() -> None:
    """All of it: ``test_the_page_is_what_the_command_writes``."""
    page = PAGE.read_text()
    found = list(sections(fast()))
    assert sum(len(section.rows) for section in found) > 150
    for line in [render.table_row(one, one.table.name) for one in found]:
        assert line in page, f"{line}: not in {PAGE.name}; run the command in its first lines"
    for line in render.why(found):
        assert line.partition(": ")[2] in page


@pytest.mark.campaign
def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    found = list(sections(wanted("all", None)))
    assert render.summary_page(found) == PAGE.read_text()
    write_page(str(tmp_path / PAGE.name), found)
    assert len(list((tmp_path / "images").iterdir())) >= 5
    rows = [row for section in found for row in section.rows]
    assert not [row for row in rows if row.verdict == UNEXPLAINED]
    fits = [row.verdict for row in rows if row.table == "fig15-fits"]
    assert fits == ["reproduced"] * 62
    every = (tmp_path / PAGE.name).read_text()
    shown = re.findall(r"(?m)^\| .* \| (reproduced|better|differs|needs a GPU) \|$", every)
    assert len(shown) == len(rows)


def test_the_verdicts_of_the_page_add_up() -> None:
    page = PAGE.read_text()
    stated = re.search(
        r"\*\*(\d+) rows: (\d+) reproduced, (\d+) better, (\d+) differs, (\d+)", page
    )
    assert stated is not None
    total, *parts = map(int, stated.groups())
    assert total == sum(parts)
    assert total == sum(int(n) for n in re.findall(r"(?m)^\| .* \| (\d+) \| .* \|$", page))


def test_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    assert main(["reproduce", "mpipemoe", "--summary", "--output", str(path)]) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["page.md"]
    assert "| mpipemoe | phi | Memory saved by reuse" in path.read_text()
    assert main(["reproduce", "mpipemoe", "--summary"]) == 2
    assert "--summary is for --output; give both" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "mpipemoe", "--figure", "table1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["rows"]) == 10
    assert all(row.keys() >= FIELDS for row in data["rows"])
    assert {row["verdict"] for row in data["rows"]} == {"reproduced"}
    assert data["assumptions"]["mpipemoe table1"]


def test_text_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "pipeoffload", "--figure", "fig16"]) == 0
    out = capsys.readouterr().out
    assert out.count("reproduced\n") >= 18 and "36 rows: " in out
    assert "ours: Megatron's local layers" in out and "figure 16" in out
    assert main(["reproduce", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(every()))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pipeoffload", "--figure", "fig99"], "no table or figure 'fig99' of pipeoffload; give"),
        (["mpipemoe", "--figure", "phi", "--output", "page.txt"], "page.txt: a page's name ends"),
        (["mpipemoe", "--figure", "phi", "--output", "/nowhere/page.md"], "cannot write /nowhere"),
    ],
)
def test_bad_input(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and says in err and err.count("\n") == 1


def test_an_unknown_paper(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["reproduce", "chimera"])
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_progress_is_reported() -> None:
    lines: list[str] = []
    list(sections(wanted("mpipemoe", "phi"), lines.append))
    assert lines[-1] == "mpipemoe phi, table 1 of 1, 6 rows"


def test_a_page_with_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    write_page(str(path), list(sections(wanted("pipeoffload", "k"))))
    assert "![" in path.read_text()
    drawn = (tmp_path / "images" / "pipeoffload-k.svg").read_text()
    assert drawn.startswith("<svg") and drawn.count("<circle") == 2 * 24 + 6


def test_large_scale_settings() -> None:
    """Ours is never slower at 1F1B's memory, and V-Half's memory is less than stock's."""
    found = [Recipe(*row) for row in published()["large-scale"]["tables"]["settings"]["rows"]]
    assert [round(one.published, 1) for one in found] == sorted(
        (round(one.published, 1) for one in found), reverse=True
    )
    for one in found:
        assert one.limit("zero-bubble") > 1, one.row
        assert one.memory("zero-bubble") <= one.memory("stock"), one.row
        assert one.memory("v-half") < one.memory("stock"), one.row
