"""The commands' argument parser and types: an error is one line."""

from __future__ import annotations

import argparse
import re
from argparse import PARSER, REMAINDER, SUPPRESS
from typing import Any, NamedTuple, NoReturn

from .._input import meant, shown
from ..schedule.generators import MOST_EFFORT


class Option(NamedTuple):
    """A declared option; the arguments of a command have all of its own in ``declared``."""

    flag: str
    default: Any


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line, and options cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        # ``--cost -1,1,1`` is a value too, which its type then refuses for what it is.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, but an unknown option is reported before a missing one."""
        known = self._option_string_actions
        nested = any(action.nargs in (PARSER, REMAINDER) for action in self._actions)
        for word in () if nested or args is None else args:
            name = word.split("=")[0]
            if word == "--":
                break
            if word.startswith("--") and " " not in word and name not in known:
                self.error(f"unrecognized arguments: {name}{meant(name, known)}")
        found, rest = super().parse_known_args(args, namespace)
        if not hasattr(found, "declared"):  # a command's own parser is the first
            found.declared = {
                action.dest: Option(action.option_strings[0], action.default)
                for action in self._actions
                if action.option_strings and action.default != SUPPRESS
            }
        return found, rest

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            message += meant(choice[1], re.findall(r"[^\s',]+", choice[2]))
        end = "" if message.endswith("?") else f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}{end}\n")


def positive(value: str) -> int:
    """A whole number >= 1, as an argparse type."""
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {shown(value)}")
    return number


def seconds(value: str) -> float:
    """Seconds of search, as an argparse type."""
    try:
        number = float(value)
    except ValueError:
        number = 0
    if not 0 < number <= MOST_EFFORT:
        raise argparse.ArgumentTypeError(
            f"must be more than 0 and at most {MOST_EFFORT} seconds, got {shown(value)}"
        )
    return number


def effort(value: str) -> float:
    """Seconds of search for an order, or 0 for the named order as it is listed at once."""
    return 0.0 if value in ("0", "0.0") else seconds(value)
