"""Plain English: the phrases that scripts/check_style.py refuses, and that the check can fail."""

from __future__ import annotations

import pytest

from scripts import check_style
from scripts.check_style import EVERYWHERE, ON_PAGES, problems


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nobody told\nit", "told"),
        ("one of three doors", "doors"),
        ("by whichever door", "door"),
        ("an accident inside", "accident"),
        ("and what mends the rest", "mends"),
        ("it does away\n# with that wait", "does away # with"),
        ("`revert` gives every byte back", "gives every byte back"),
        ("which are whole", "are whole"),
        ("the last whole iteration", "last whole"),
        ("# What leaves the device", "What leaves"),
    ],
)
def test_phrases_are_found(text: str, words: str) -> None:
    assert words in [found for _, found, _ in problems(text, EVERYWHERE)]


@pytest.mark.parametrize(
    "text",
    [
        "documents are told apart by a mask",
        "from .integration import doors",
        "doors.enable()",
        "costs are whole microseconds",
        "the whole batch",
        "B reads again what F wrote",
        "recommended, amend",
    ],
)
def test_other_words_are_not(text: str) -> None:
    assert not list(problems(text, EVERYWHERE))


@pytest.mark.parametrize(
    "text",
    ["it lies on rank 0", "see [13](planning.md)", "evenly, but for the last", "training goes on"],
)
def test_pages_have_more(text: str) -> None:
    assert list(problems(text, ON_PAGES)) and not list(problems(text, EVERYWHERE))


def test_lines_are_numbered() -> None:
    assert [line for line, _, _ in problems("a\nb\ntold\n", EVERYWHERE)] == [3]


def test_pages_and_package_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_style.main() == 0, capsys.readouterr().out
    released = [text for path, text in check_style.pages() if path.name == "CHANGELOG.md"]
    assert "## [Unreleased]" in released[0]
    assert len(list(check_style.code())) > 250
