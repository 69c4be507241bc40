"""The papers' tables beside ours: the rule of a verdict, and a page of today."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.papers.compare import RULES, TABLES, rows_of, verdict
from tests.support import ROOT

PAGE = (ROOT / "benchmarks" / "papers" / "README.md").read_text()
FAST = ("gis", "table2", "fig5", "small", "comparison", "phi", "table1", "fig10")


@pytest.mark.parametrize(
    ("rule", "published", "ours", "expected"),
    [
        ("exact", 54, 54.4, "differs"),
        ("exact", "fits", "fits", "same"),
        ("order", 100, 101, "same"),
        ("order", 100, 102, "differs"),
        ("order", 100, 90, "better"),
        ("bytes", 3, 3.5, "same"),
        ("time", 50, 44, "differs"),
        ("points", 0.3, 2.2, "same"),
    ],
)
def test_verdicts(rule: str, published: float | str, ours: float | str, expected: str) -> None:
    assert verdict(RULES[rule], published, ours) == expected


@pytest.mark.parametrize("table", [t for t in TABLES if t.key in FAST], ids=lambda t: t.name)
def test_orders_reach_what_is_published(table) -> None:
    rows = rows_of(table)
    assert rows and not [row for row in rows if row.verdict == "differs"]
    found = Counter(row.verdict for row in rows)
    tally = ", ".join(f"{found[name]} {name}" for name in ("same", "better") if found[name])
    assert f"| {table.name} | {table.title} | {table.rule} | {tally} |" in PAGE
