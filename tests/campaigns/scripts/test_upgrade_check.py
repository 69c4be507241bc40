"""scripts/upgrade_check.py: what moved, what does not fit, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import upgrade_check as script


def hook(**changed: Any) -> dict[str, Any]:
    held = {"target": "m:f", "signature": "(a, b=1)", "body": "1", "error": None, "why": "x"}
    return {**held, "needs": ["a"], "groups": ["flags"], **changed}


def entry(name: str, **changed: Any) -> dict[str, Any]:
    found = {"name": name, "version": "0.19.0", "note": "", "commit": None, "error": None}
    return {**found, "hooks": {"m:f": hook()}, "not_restored": [], **changed}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"target": "n:f"}, ["`f` moved from m:f to n:f"]),
        ({"signature": "(a, *, c: int = 2)"}, ["`f`: signature lost b; gained c"]),
        ({"signature": "(b, a)"}, ["`f`: signature with the same names in another form"]),
        ({"body": "2"}, ["`f`: other code behind the same signature"]),
        ({"error": "gone"}, []),
    ],
)
def test_what_moved(changed: dict[str, Any], words: list[str]) -> None:
    old, new = entry("old"), entry("new", hooks={"m:f": hook(**changed)})
    assert script.moved(old, new) == words


def test_what_does_not_fit_says_what_to_do() -> None:
    (text,) = script.problems(entry("new", hooks={"m:f": hook(error="no m:f")}))
    assert text.startswith("new: no m:f; look for what took its place")
    gone = {"state": "does not fit", "error": "no place"}
    assert "patching.py" in script.problems(entry("main", note="not supported", patches=gone))[0]
    assert script.problems(entry("main", not_restored=["m:f"])) == ["main: m:f was not given back"]
    assert script.problems(entry("main", error="it cannot be imported: x")) != []
    assert script.problems(entry("old")) == []
    page = script.page([entry("old"), entry("new", hooks={"m:f": hook(body="2")})])
    assert "| old | 0.19.0 |" in page and "- `f`: other code" in page and "Nothing." in page


class First:
    def f(self, a: int) -> int:
        """Text."""
        return a + 1


class Same:
    def f(self, a: int) -> int:
        """Other text."""
        # a comment
        return a + 1


class Other:
    def f(self, a: int) -> int:
        """Text."""
        return a + 2


def test_code_counts_and_its_comments_do_not() -> None:
    first, same, other = (script.describe(kind.f) for kind in (First, Same, Other))
    assert first == same
    assert first["body"] and first["body"] != other["body"]
