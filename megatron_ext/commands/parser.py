"""The commands' argument parser, and options as data: an error is one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .._input import meant, shown


class InputError(Exception):
    """What the user gave cannot be used; the text is the whole message.

    Attributes:
        status: the command's exit status.
    """

    status = 2


class InvalidSchedule(InputError):
    """A file's schedule cannot be executed: a negative answer."""

    status = 1


@dataclass(frozen=True)
class Options:
    """Options, each by its name and value as the help shows them (``--pp P``), with its help.

    One without a value or a kind is a switch.

    Attributes:
        help: by option.
        kinds: by name: the type of a value, or its choices as a tuple; a text where it is absent.
        defaults: by name; else None, or False of a switch.
    """

    help: Mapping[str, str]
    kinds: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def declare(self, parser: Parser, box: argparse._ActionsContainer | None = None) -> None:
        """Add them to a parser, or to a group in it."""
        for words, text in self.help.items():
            name, _, value = words.partition(" ")
            kind, more = self.kinds.get(name), dict[str, Any]()
            if isinstance(kind, tuple):
                more = {"choices": kind, "type": type(kind[0])}
            elif kind is not None:
                more = {"type": kind}
            elif not value:
                more = {"action": "store_true"}
            if value:
                more["metavar"] = value
            if name in self.defaults:
                more["default"] = self.defaults[name]
            (box or parser).add_argument(name, help=text, **more)


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line, and options cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        # ``--cost -1,1,1`` is a value too, which its type then refuses for what it is.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def declare(self, title: str, *tables: Options) -> None:
        """Add a group of options."""
        group = self.add_argument_group(title)
        for table in tables:
            table.declare(self, group)

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


JSON = Options({"--json": "print one JSON object"})
