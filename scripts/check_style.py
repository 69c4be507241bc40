"""Refuses phrases that only we understand, and suggests others: ``python -m scripts.check_style``.

Pages are checked against all phrases; code, with its comments and messages, against those of
``EVERYWHERE``. A phrase may span lines. Exit status 1 if something is found. Needs a bare Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Phrase(NamedTuple):
    """A pattern, and what to write in its place."""

    pattern: str
    better: str

    def found(self, text: str) -> Iterator[tuple[int, str]]:
        """Line numbers and words of all matches; a space also matches a line's end."""
        spaced = self.pattern.replace(" ", r"[\s#\"]+")
        for match in re.finditer(spaced, text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


EVERYWHERE = (
    Phrase(r"\btold\b(?! apart)", "is logged, is reported, knows"),
    Phrase(r"\bmend(s|ed|ing)?\b", "fix"),
    Phrase(r"\baccidents?\b", "fault"),
    Phrase(r"(?<!import\s)(?<!\.)\bdoors?\b(?!\.)", "way to load, entry point"),
    Phrase(r"\bunsaid\b", "not reported"),
    Phrase(r"\b(is|are) said\b", "is logged, is reported"),
    Phrase(r"\bdo(es)? away with\b", "removes"),
    Phrase(
        r"\bgiv(e|es|en|ing) (every(thing)?|all|each|megatron|the original)\b[^.:;|]{0,40}\bback\b",
        "restores",
    ),
    Phrase(r"\bread again\b", "review"),
    Phrase(r"\bwhat leaves\b", "what is offloaded"),
    Phrase(r"\b(is|are|was|were) (not )?whole\b(?! (microsecond|period|number|unit))", "complete"),
    Phrase(r"\b(last|latest|newest) whole\b", "complete"),
    Phrase(r"\bof one's own\b", "your own"),
    Phrase(r"\bin who asks for it\b", "in how it is loaded"),
    Phrase(r"\bwhere the stages lie\b", "rank and chunk of every stage"),
    Phrase(r"\bwhat (the numbers|they) rests? on\b", "assumptions"),
)
ON_PAGES = (
    Phrase(r"\b(lies|lie|lain)\b", "is, are"),
    Phrase(r"\bstands? (still|beside|on|above|below|before|behind|there)\b", "is; hangs"),
    Phrase(r"\b(nobody|somebody|anybody)\b", "who: another rank, the user, no process"),
    Phrase(r"\bbut for\b", "except"),
    Phrase(r"\bleave the flag away\b", "do not use the flag"),
    Phrase(r"\bgoes on\b", "continues"),
    Phrase(r"\bas always\b", "as usual"),
    Phrase(r"\b(says|said) so\b", "reports it, logs it"),
    Phrase(r"\bfrom scratch anew\b|\bmade anew\b", "made again, re-planned"),
    Phrase(r"\bthe costs are others\b", "your pass times differ"),
    Phrase(r"\bare taken care of\b|\bis taken care of\b", "is handled"),
    Phrase(r"\bgives? [^.:;|]{1,40} back\b", "restores, returns"),
    Phrase(r"\[\d+\]\(", "a link's text names its page"),
    Phrase(r"\(\[[^\]]*\]\([^)]*\)\) \(\[", "one link in a bracket"),
)


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with its text; of the changelog what is not released."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"):
        yield path, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        yield path, path.read_text(encoding="utf-8")
    path = ROOT / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    start = text.index("## [Unreleased]")
    end = text.find("\n## [", start + 1)
    yield path, text[: end if end > 0 else None]


def code() -> Iterator[tuple[Path, str]]:
    """Every file of the package."""
    for path in sorted((ROOT / "megatron_ext").rglob("*.py")):
        yield path, path.read_text(encoding="utf-8")


def problems(text: str, phrases: Sequence[Phrase]) -> Iterator[tuple[int, str, str]]:
    """Line, words, and what to write, in the order of the phrases."""
    for phrase in phrases:
        for line, words in phrase.found(text):
            yield line, words, phrase.better


def main() -> int:
    """Print every problem; returns the exit status."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}: write {better}"
        for files, phrases in ((pages(), EVERYWHERE + ON_PAGES), (code(), EVERYWHERE))
        for path, text in files
        for line, words, better in problems(text, phrases)
    ]
    print("\n".join(found) or "style: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
