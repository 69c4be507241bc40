"""Rules that facts of a run must keep, as data; their sentences have one style."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

from .errors import ConfigError

VERBS = ("needs", "does not support", "is for")


class Rule(NamedTuple):
    """One rule. Names in braces stand for facts that are given when it is applied.

    Attributes:
        rule: subject, one of ``VERBS``, object.
        found: in a run that breaks it; for what is not supported the reason.
        fix: what to do.
        broken_by: given the facts as attributes, true where they break it; None: who applies it
            knows.
    """

    rule: str
    found: str
    fix: str
    broken_by: Callable[[Any], Any] | None = None

    @property
    def text(self) -> str:
        """The sentence, with its facts in braces."""
        excluded = VERBS[1] in self.rule
        return f"{self.rule}{': ' if excluded else ', but '}{self.found}; {self.fix}"

    def broken(self, **facts: object) -> ConfigError:
        """The error of a run with these facts."""
        return ConfigError(self.text.format(**facts))

    def require(self, kept: object, **facts: object) -> None:
        """Raise unless it is ``kept``.

        Raises:
            ConfigError: the rule with these facts.
        """
        if not kept:
            raise self.broken(**facts)


def require(rules: Iterable[Rule], **facts: Any) -> None:
    """Refuse facts that break a rule.

    Raises:
        ConfigError: the first one.
    """
    given = SimpleNamespace(**facts)
    for rule in rules:
        if rule.broken_by is not None and rule.broken_by(given):
            raise rule.broken(**facts)


TWO_RANKS = Rule(
    "--pp-schedule {name} needs {size} >= 2",
    "it is {pp}",
    "raise it, or drop the schedule",
    lambda it: it.pp < 2,
)
FREE_ORDER = Rule(
    "{flag} is for schedules that are ordered by costs",
    "--pp-schedule {schedule} is a file, whose order is fixed",
    "drop {flag}",
)
ENOUGH_CHUNKS = Rule(
    "--pp-offload-chunks {wanted} needs as many model chunks on each pipeline rank",
    "it has {chunks}",
    "give 1 to {chunks}, or add virtual stages (--num-virtual-stages-per-pipeline-rank)",
)
