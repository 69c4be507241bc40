"""The pages of ``show`` and ``compare`` in a real browser, used as a person would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ext.cli import main
from megatron_ext.schedule import NAMES, generate, simulate
from megatron_ext.view import page
from megatron_ext.view.timeline import planned
from tests.support.browser import Browser, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

RIGHT = "\ue014"  # an arrow key of the WebDriver standard


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found
        assert found.errors() == []


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a page of ``compare``."""
    path = tmp_path_factory.mktemp("page") / "compare.html"
    assert main(["compare", "--pp", "4", "--microbatches", "8", "--output", str(path)]) == 0
    return f"file://{path}"


def _open(window: Browser, address: str) -> None:
    window.open(address)
    window.wait("VIEWER.blocks && VIEWER.blocks.length")


def test_all_schedules_side_by_side(window: Browser, compared: str) -> None:
    """The table and the timelines have the same order, and the simulation's numbers."""
    _open(window, compared)
    rows = window.run(
        "return [...document.querySelectorAll('tr')].map("
        "row => [...row.cells].map(cell => cell.textContent))"
    )
    titles = window.run("return VIEWER.runs.map(run => run.title)")
    assert rows[0][:4] == ["schedule", "chunks", "bubble", "makespan"]
    assert [row[0] for row in rows[1:]] == titles and set(titles) == set(NAMES)
    numbers = {row[0]: row[1:] for row in rows[1:]}
    assert numbers["v-half"][1:3] == ["9.43 %", "26.5"]
    times = window.run("return VIEWER.runs.map(run => run.makespan)")
    assert times == sorted(times)
    drawn = window.run("return VIEWER.blocks.map(block => block.rows)")
    assert drawn == sorted(set(drawn)), "one under the other"


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(window: Browser, compared: str, width: int) -> None:
    window.size(width, 844)
    _open(window, compared)
    assert window.run("return document.documentElement.scrollWidth") <= width
    window.size(1280, 900)


def test_dark_mode(window: Browser, compared: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    for dark, color in ((True, "rgb(18, 23, 29)"), (False, "rgb(255, 255, 255)")):
        window.dark(dark)
        _open(window, compared)
        assert window.run(f"return {ground}") == color


@pytest.fixture
def timeline(window: Browser, tmp_path) -> str:
    """The page of ``show``; the viewer's canvas."""
    path = tmp_path / "timeline.html"
    path.write_text(page.render(planned(simulate(generate("v-zb", 16, 64)))))
    _open(window, f"file://{path}")
    return "#timeline canvas"


def test_zooming_and_moving(window: Browser, timeline: str) -> None:
    """Keys, buttons and the mouse; what is pointed at stays under the pointer."""
    whole = window.run("return VIEWER.span")
    window.type(timeline, "+++")
    assert window.run("return VIEWER.span") == pytest.approx(whole / 1.5**3)
    left = window.run("return VIEWER.from")
    window.drag(timeline, (600, 60), (500, 60))
    moved = window.run("return [VIEWER.from, VIEWER.span, VIEWER.plot]")
    assert moved[0] == pytest.approx(left + 100 * moved[1] / moved[2])
    window.click("button[title^='zoom out']")
    assert window.run("return VIEWER.span") == pytest.approx(whole / 1.5**2)
    window.type(timeline, "0")
    assert window.run("return [VIEWER.from, VIEWER.span]") == [0, whole]
    window.type(timeline, RIGHT)  # there is no more to the right
    assert window.run("return VIEWER.from") == 0


def test_the_tooltip_names_the_pass(window: Browser, timeline: str) -> None:
    row = window.run(
        "const b = VIEWER.blocks[0], p = b.run.rows[3][0];"
        "return [VIEWER.x((p[0] + p[1]) / 2), b.rows + 3 * b.step + b.row / 2]"
    )
    window.hover(timeline, (round(row[0]), round(row[1])))
    text = window.run("return document.querySelector('.tip').textContent")
    assert text.startswith("F forward, microbatch 0\nstage 3, chunk 0, rank 3\n1.5 to 2\n")
    assert "rank 3 holds 0.5 microbatches" in text


def test_numbers_appear_when_there_is_room(window: Browser, timeline: str) -> None:
    """None at p = 16, m = 64; every pass in sight has one after zooming in, clear of the labels."""
    script = """
        const seen = [], pen = VIEWER.canvas.getContext("2d"), write = pen.fillText;
        pen.fillText = function (text, x) { seen.push([text, x]); write.apply(this, arguments); };
        VIEWER.paint();
        pen.fillText = write;
        const numbers = seen.filter(([text, x]) => /^\\d+$/.test(text)
          && x > VIEWER.left && x < VIEWER.left + VIEWER.plot);
        return [numbers.length, Math.min(...numbers.map(([, x]) => x)) - VIEWER.left]
    """
    ticks, _ = window.run(script)
    window.type(timeline, "+" * 6)
    numbers, margin = window.run(script)
    assert ticks < 30 and numbers > 300 and margin > 0
