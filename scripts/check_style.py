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
    Phrase(r"\banew\b", "again"),
    Phrase(r"\bone of both\b", "one of them"),
    Phrase(r"\bwhoever\b", "the rank, code or user that"),
    Phrase(r"\bkeeps? to (itself|themselves)\b", "does not expose"),
    Phrase(r"\b(that|which) would do\b", "sufficient"),
    Phrase(r"\bstood still\b", "waited"),
    Phrase(r"\bas ever\b", "as usual"),
    Phrase(r"\bmade-up\b", "simulated, random"),
    Phrase(r"\b(go|goes) together\b", "can be combined"),
    Phrase(r"\bunder way\b", "in flight, running"),
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
    Phrase(r"\bthe costs are others\b", "your pass times differ"),
    Phrase(r"\bare taken care of\b|\bis taken care of\b", "is handled"),
    Phrase(r"\bgives? [^.:;|]{1,40} back\b", "restores, returns"),
    Phrase(r"\bfor so long\b", "during that time"),
    Phrase(r"\b(the way )?there and back\b", "to the host and back"),
    Phrase(r"\bnot concerned\b", "not affected"),
    Phrase(r"\bas (it|they) stands?\b", "unchanged"),
    Phrase(r"\bbehaves? otherwise\b", "differs"),
    Phrase(r"\bbelieve\b", "check, compare"),
    Phrase(r"\b(is|are) left alone\b", "is not changed"),
    Phrase(r"\bthe page about it\b", "a link's text names its page"),
    Phrase(r"\[\d+\]\(", "a link's text names its page"),
    Phrase(r"\(\[[^\]]*\]\([^)]*\)\) \(\[", "one link in a bracket"),
)


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with its text; of the changelog what is not released."""
    single = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    folders = ("docs", "benchmarks", "examples", "tests")
    written = [path for name in folders for path in (ROOT / name).rglob("*.md")]
    for path in (*(ROOT / name for name in single), *sorted(written)):
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
