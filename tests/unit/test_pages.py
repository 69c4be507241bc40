"""Numbers and lists on the pages, made again: each is what a command gives today."""

from __future__ import annotations

import importlib
import re

from benchmarks.papers.compare import RECIPES
from megatron_ext import cli
from megatron_ext.schedule import Simulation, generate, simulate
from scripts import reference_pages
from tests.support import ROOT
from tests.support.closed_forms import FORMS

README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs" / "start" / "choosing.md").read_text()


def run(name: str, pp: int, microbatches: int, slices: int = 1) -> Simulation:
    """At equal costs, with the number of chunks that the pages state."""
    chunks = 2 if name in ("interleaved", "interleaved-zb", "gis", "gis-h", "po") else None
    cap = 2 * pp * 3 // 4 if name == "v-cap" else None  # sets of half a microbatch
    return simulate(generate(name, pp, microbatches, chunks, memory_cap=cap, slices=slices))


def rows(text: str, start: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``start``."""
    lines = text[text.index(start) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines[2:]]


def test_the_page_of_choosing_has_the_large_scale_settings() -> None:
    expected = []
    for one in RECIPES:
        expected.append(
            [
                one.row,
                f"{one.idle('stock'):.1f} %",
                f"{one.idle('zero-bubble'):.1f} %",
                f"{one.limit('zero-bubble'):.2f}x",
                f"{one.idle('v-half'):.1f} %",
                f"{one.memory('v-half'):.2f}",
            ]
        )
        assert one.memory("zero-bubble") == 1
    assert rows(CHOOSING, "| recipe of Megatron-Bridge") == expected
    first, last = round(float(expected[-1][1][:-2])), round(float(expected[0][1][:-2]))
    assert f"idles {first} to {last} %" in CHOOSING
    worse = sum(float(row[4][:-2]) > float(row[1][:-2]) for row in expected)
    assert worse == 5 and "idles more than stock in five rows" in " ".join(CHOOSING.split())


def test_the_readmes_first_training_example_gains_both() -> None:
    """Bubble and memory are lower than those of stock 1F1B, at its sizes."""
    flags = README[README.index("FLAGS=(") :].split(")")[0]
    pp, batch = (
        int(re.findall(rf"--{name} (\d+)", flags)[0])
        for name in ("pipeline-model-parallel-size", "global-batch-size")
    )
    (name,) = re.findall(r"--pp-schedule (\S+)", flags)
    ours, stock = run(name, pp, batch), run("1f1b", pp, batch)
    assert ours.bubble < stock.bubble
    assert max(ours.peak_activation) < max(stock.peak_activation)
    assert (pp, batch) == (4, 8) and "Four ranks, 8 microbatches" in README
    found = rows(README, "| schedule | bubble | peak | bubble, 4 slices")
    assert len(found) == 5
    for label, *shown in found:
        name = label.split("`")[1]
        for one, cells in ((run(name, pp, batch), shown[:2]), (run(name, pp, batch, 4), shown[2:])):
            peak = float(max(one.peak_activation))
            assert cells == [f"{float(100 * one.bubble):.2f} %", f"{peak:.4g}"], name


def test_the_table_of_all_schedules() -> None:
    text = (ROOT / "docs" / "reference" / "schedules.md").read_text()
    found = rows(text, "| schedule | peak, any p")
    names = [row[0].split("`")[1] for row in found]
    assert {*FORMS, "v-cap", "gis", "gis-h", "po"} == set(names)
    for name, row in zip(names, found):
        short, long = run(name, 8, 16), run(name, 8, 32)
        assert row[2] == f"{float(max(long.peak_activation)):g}", name
        bubbles = [f"{float(100 * one.bubble):.1f} %" for one in (short, long)]
        assert row[3:5] == bubbles, name
        if name in FORMS:
            for p, m in ((4, 8), (6, 12), (8, 32)):
                assert run(name, p, m).makespan == FORMS[name].makespan(p, m, 2), (name, p, m)
        else:
            assert row[5] == "-", name
    assert [max(run("gis-h", p, 32).peak_activation) for p in (4, 8, 16)] == [3, 6, 12]


def test_the_pages_share_one_tiny_example() -> None:
    wanted = README[README.index("FLAGS=(") :].split(")")[0]
    found = []
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text()
        if "--hidden-size 64 " in text:
            assert text[text.index("FLAGS=(") :].split(")")[0] == wanted, path
            found.append(path.stem)
    assert sorted(found) == ["quick-start", "tracing"]


def test_the_readme_lists_every_command() -> None:
    for name in cli.COMMANDS:
        assert f"megatron-ext {name}" in README, name


def test_every_environment_variable_is_on_the_page() -> None:
    known = set(reference_pages.ENVIRONMENT) | reference_pages.INTERNAL
    for path in (ROOT / "megatron_ext").rglob("*.py"):
        for name in re.findall(r"\bMEGATRON_EXT_[A-Z_]*", path.read_text()):
            assert name in known, f"{path.name}: {name} belongs into {reference_pages.__name__}"


def test_public_names_exist() -> None:
    for name in ("megatron_ext", "megatron_ext.schedule"):
        module = importlib.import_module(name)
        assert all(hasattr(module, one) for one in module.__all__)
