"""The commands' argument parser, and options as data: an error is one line."""

from __future__ import annotations

import argparse
import re
from argparse import PARSER, REMAINDER, SUPPRESS
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from .._input import attribute, flag_of, meant, shown


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
        kinds: by name: the type of a value, its choices as a tuple, or ``list`` where the option
            may be repeated; a text where it is not there.
        defaults: by name; else None, or False of a switch.
        required: names of those that must be given.
        needs: by name: the option that it is for, perhaps with the value.
    """

    help: Mapping[str, str]
    kinds: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Collection[str] = ()
    needs: Mapping[str, str] = field(default_factory=dict)

    def declare(self, parser: Parser, box: argparse._ActionsContainer | None = None) -> None:
        """Add them to a parser, or to a group in it."""
        for words, text in self.help.items():
            name, _, value = words.partition(" ")
            kind, more = self.kinds.get(name), dict[str, Any]()
            if isinstance(kind, tuple):
                more = {"choices": kind, "type": type(kind[0])}
            elif kind is list:
                more = {"action": "append"}
            elif kind is not None:
                more = {"type": kind}
            elif not value:
                more = {"action": "store_true"}
            if value:
                more["metavar"] = value
            if name in self.defaults:
                more["default"] = self.defaults[name]
            if name in self.required:
                more["required"] = True
            (box or parser).add_argument(name, help=text, **more)
        parser.needs |= {attribute(name): what for name, what in self.needs.items()}


class Option(NamedTuple):
    """A declared option; the arguments of a command have all of its own in ``declared``."""

    flag: str
    default: Any


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line, and options cannot be abbreviated.

    Attributes:
        needs: of ``Options``, by the name of the value.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.needs: dict[str, str] = {}
        # ``--cost -1,1,1`` is a value too, which its type then refuses for what it is.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def declare(self, title: str, *tables: Options) -> None:
        """Add a group of options."""
        group = self.add_argument_group(title)
        for table in tables:
            table.declare(self, group)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, but an unknown option is reported before a missing one.

        Raises:
            InputError: an option is there without the one that it is for.
        """
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
            for name, needed in self.needs.items():
                flag, _, value = needed.partition(" ")
                if _given(found, name) and not _given(found, attribute(flag), value):
                    raise InputError(f"{_text(found, name)} is for {needed}; give both")
        return found, rest

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            message += meant(choice[1], re.findall(r"[^\s',]+", choice[2]))
        end = "" if message.endswith("?") else f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}{end}\n")


def _given(args: argparse.Namespace, name: str, value: str = "") -> bool:
    """An option was given, with this value if any, and not to turn something off."""
    option, found = args.declared.get(name), getattr(args, name, None)
    if found in (None, "off") or (option is not None and found == option.default):
        return False
    return not value or str(found) == value


def _text(args: argparse.Namespace, name: str) -> str:
    value = getattr(args, name)
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


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
