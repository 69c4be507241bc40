"""User input: files and numbers of any size and shape, read or refused with one sentence.

Nothing here evaluates what it reads. Sizes are limited before anything is allocated for them.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 64 << 20  # of a file; the largest schedules that are of use have a tenth of it
_PART = 1 << 20
_LONGEST_NUMBER = 60  # characters
_LARGEST = 10**100  # of a number, and of its inverse: beyond, floats overflow soon
# Exponents of three digits: a longer one would be computed, digit by digit, before any check.
_NUMBER = re.compile(r"[+-]?(?:\d+/\d+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)", re.ASCII)


def read_text(path: str | Path, encoding: str = "utf-8", most_bytes: int = MOST_BYTES) -> str:
    """The text of a file; a device or a pipe is read up to the limit, too.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than ``most_bytes``, or is not of this encoding.
    """
    data = bytearray()
    with Path(path).open("rb") as file:
        # By parts: one call for so many bytes would allocate them all at once.
        while part := file.read(_PART):
            data += part
            if len(data) > most_bytes:
                raise ValueError(f"it has more than the {most_bytes >> 20} MiB that are read")
    return data.decode(encoding)


def parse_json(text: str) -> Any:
    """The value of a JSON text; NaN and infinities, which JSON has not, are refused.

    Raises:
        ValueError: it is no JSON, or nested more deeply than anything of ours.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def shown(value: object) -> str:
    """``repr`` of whatever was found in place of what was expected, a short part of it."""
    text = _BRIEF.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def plain(text: str) -> str:
    """``text`` as the user wrote it where that is short and printable, else ``shown``."""
    return text if len(text) <= _LONGEST_NUMBER and text.isprintable() else shown(text)


def meant(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The ending of an error about an unknown name: "; did you mean v-half?", or nothing where no
    known one has that ``likeness``, from 0 to 1."""
    found = difflib.get_close_matches(word, list(known), 1, likeness)
    return f"; did you mean {found[0]}?" if found else ""


def only_known(data: Iterable[object], known: Iterable[str], what: str) -> None:
    """Refuse a key of an object that nothing would read.

    Raises:
        ValueError: there is one; the text names it and ``what`` has it.
    """
    names = list(known)
    for key in data:
        if key not in names:
            raise ValueError(f"{what} has no field {shown(key)}{meant(str(key), names)}")


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60
_BRIEF.maxlevel = 4
_LONGEST_SHOWN = 300  # characters


def whole(value: object, what: str, least: int = 0, most: int = 10**9) -> int:
    """``value`` as an int; a float only if it is an integer, a bool never.

    Raises:
        ValueError: it is none, or not in ``least`` to ``most``; the text names ``what``.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (least <= value <= most and value == int(value)):  # type: ignore[operator, call-overload]
        raise ValueError(
            f"{what} must be a whole number from {least} to {most}, got {shown(value)}"
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


def real(value: object, what: str, most: float) -> float:
    """``value`` as a float from 0 to ``most``.

    Raises:
        ValueError: it is no such number; the text names ``what``.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{what} must be a number >= 0 and <= {most:g}, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def fraction(value: int | float | str | Fraction) -> Fraction:
    """The exact number: ``0.1`` is one tenth, ``"1/3"`` a third.

    Raises:
        ValueError: it is no number, or one beyond 1e100 (or below 1e-100) that would take
            unreasonable time and memory.
    """
    if isinstance(value, Fraction):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{shown(value)} is no number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    text = str(value).strip()
    if len(text) > _LONGEST_NUMBER or _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{shown(text)} is no number of at most {_LONGEST_NUMBER} characters")
    try:
        number = Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"{shown(text)} divides by zero") from None
    if number and not Fraction(1, _LARGEST) <= abs(number) <= _LARGEST:
        raise ValueError(f"{shown(text)} is not between 1e-100 and 1e100")
    return number


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(text: str) -> int:
    """``40GiB``, ``80GB``, ``1.5TiB``, or a plain number of bytes.

    Raises:
        ValueError: it is none of these, or not > 0.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMGT]i?B|B)?\s*", text)
    unit = found[2] or "B" if found else "B"
    power = "BKMGT".index(unit[0]) if unit != "B" else 0
    try:
        size = int(float(found[1] if found else "") * (1024 if "i" in unit else 1000) ** power)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"a size must be a number of bytes > 0 such as 40GiB, got {shown(text)}")
    return size


def size_text(size: int) -> str:
    """Bytes for people, in the form that ``parse_bytes`` reads; rounded up, to be enough."""
    power = 0
    while size >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    hundredths = math.ceil(Fraction(100 * size, 1024**power))
    return f"{hundredths / 100:g}{_UNITS[power]}"


def reason(error: Exception) -> str:
    """Why a file cannot be used, in words: of the system's errors without number and name."""
    return getattr(error, "strerror", None) or str(error)


def attribute(flag: str) -> str:
    """Name of a flag's value in parsed arguments: ``--pp-cost`` -> ``pp_cost``."""
    return flag.removeprefix("--").replace("-", "_")


def flag_of(name: str) -> str:
    """The flag of a value in parsed arguments: ``pp_cost`` -> ``--pp-cost``."""
    return "--" + name.replace("_", "-")


# Where Megatron's argument is not named as its flag.
_RENAMED = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--output-logit-dtype": "logit_dtype",
}


def argument(flag: str) -> str:
    """The name in Megatron's ``args`` of one of its flags."""
    return _RENAMED.get(flag, attribute(flag))


def values_of(tokens: Sequence[str]) -> dict[str, Any]:
    """Flags of a command line by argument name: true, or their values with commas between."""
    found: dict[str, Any] = {}
    name = None
    for token in tokens:
        if token.startswith("--"):
            flag, _, value = token.partition("=")
            name = argument(flag)
            found[name] = value or True
        elif name is not None:
            found[name] = token if found[name] is True else f"{found[name]},{token}"
    return found
