"""The page of ``explore`` and the timeline's page in a real browser, used as a person would."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megatron_ext.commands.explore.answers import Explorer
from megatron_ext.commands.explore.server import serve
from megatron_ext.schedule import generate, simulate
from megatron_ext.schedule.io import save
from megatron_ext.view import page
from megatron_ext.view.timeline import planned
from tests.support.browser import Browser, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

READY = "document.getElementById('status').textContent.startsWith('all schedules')"
RIGHT = "\ue014"  # an arrow key of the WebDriver standard


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found
        # The browser complains of every answer that says what is wrong, too.
        assert [error for error in found.errors() if "status of 400" not in error] == []


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("files") / "mine.json"
    save(generate("zb-h1", 4, 8), path)
    explorer = Explorer()
    explorer.add_file("mine.json", path)
    server = serve(explorer, 0, fallback=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def _open(window: Browser, address: str, options: str, above: str, below: str) -> None:
    window.open("about:blank")
    view = options.replace(" ", "+")
    window.open(f"{address}#options={view}&schedule={above}&schedule={below}")
    window.wait(READY)


def _rows(window: Browser) -> dict[str, list[str]]:
    rows = window.run(
        "return [...document.querySelectorAll('#rows tr')].map("
        "row => [...row.cells].map(cell => cell.textContent))"
    )
    return {row[0]: row[1:] for row in rows}


def test_the_first_view(window: Browser, address: str) -> None:
    window.size(1280, 900)
    window.open(address)
    window.wait(READY)
    rows = _rows(window)
    assert rows["v-half"] == ["15.04 %", "5", "56.5", "0.00 %"]
    assert rows["1f1b"][:2] == ["30.43 %", "8"]
    titles = window.run("return viewer.runs.map(run => run.title)")
    assert titles == ["1f1b", "v-half"]
    assert "--pp-schedule v-half" in window.run("return document.body.innerText")


def test_a_slider_changes_everything(window: Browser, address: str) -> None:
    """Table, timeline, address and flags follow; the numbers are the simulation's."""
    _open(window, address, "--pp 4 --microbatches 8", "1f1b", "v-half")
    window.type("#microbatches", RIGHT * 4)
    window.wait("location.hash.includes('microbatches+12')")
    window.wait(f"{READY} && viewer.runs[0].microbatches === 12")
    run = simulate(generate("v-half", 4, 12))
    assert _rows(window)["v-half"][0] == f"{float(100 * run.bubble):.2f} %"
    assert window.run("return viewer.runs[1].makespan") == float(run.makespan)
    window.type("#hop", RIGHT * 10)
    window.wait(f"{READY} && document.body.innerText.includes('--pp-cost 1,1,1,0.1')")
    window.run(
        "const cap = document.getElementById('cap'); cap.value = 0.8;"
        "cap.dispatchEvent(new Event('input'))"
    )
    window.wait(f"{READY} && document.querySelector('#scatter .cap') !== null")
    assert window.run("return document.querySelector('#rows tr.over') !== null")


def test_a_row_is_chosen_and_links_come_back(window: Browser, address: str) -> None:
    _open(window, address, "--pp 4 --microbatches 8", "1f1b", "v-half")
    count = window.run(
        "const rows = [...document.querySelectorAll('#rows button')];"
        "rows.find(row => row.textContent === 'v-zb').click(); return rows.length"
    )
    assert count >= 13
    window.wait("viewer.runs[1].title === 'v-zb'")
    link = window.run("return location.href")
    window.open("about:blank")
    window.open(link)
    window.wait(f"{READY} && viewer.runs[1].title === 'v-zb'")
    assert window.run("return document.getElementById('below').value") == "v-zb"


def test_a_file_and_more_options(window: Browser, address: str) -> None:
    options = "--pp 4 --microbatches 8 --jitter 0.1"
    _open(window, address, options, "1f1b", "file:+mine.json")
    assert window.run("return viewer.runs[1].title") == "zb-h1"
    assert window.run("return document.getElementById('more').value") == "--jitter 0.1"
    assert "file: mine.json" in _rows(window)


def test_a_mistake_is_said(window: Browser, address: str) -> None:
    _open(window, address, "--pp 4 --microbatches 8", "1f1b", "v-half")
    window.click("#controls summary")
    window.type("#more", "--nonsense 1")
    window.wait("document.getElementById('status').className === 'bad'")
    assert "--nonsense" in window.run("return document.getElementById('status').textContent")


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(window: Browser, address: str, width: int) -> None:
    window.size(width, 844)
    _open(window, address, "--pp 8 --microbatches 16", "1f1b", "v-half")
    assert window.run("return document.documentElement.scrollWidth") <= width
    window.size(1280, 900)


def test_dark_mode(window: Browser, address: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    for dark, color in ((True, "rgb(18, 23, 29)"), (False, "rgb(255, 255, 255)")):
        window.dark(dark)
        _open(window, address, "--pp 4 --microbatches 8", "1f1b", "v-half")
        assert window.run(f"return {ground}") == color


@pytest.fixture
def timeline(window: Browser, tmp_path) -> str:
    """The page of ``show``; the viewer's canvas."""
    path = tmp_path / "timeline.html"
    path.write_text(page.render(planned(simulate(generate("v-zb", 16, 64)))))
    window.open(f"file://{path}")
    window.wait("VIEWER.blocks && VIEWER.blocks.length")
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
