"""The flags of a training command: in order, with what each of them is to a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._megatron_flags import LAYOUT, NEUTRAL, OURS, kind_of
from ..plan.slices import PACKED


class Flags:
    """Flags with their values, in the order of the command; the last of equal ones counts.

    Args:
        words: ``--name value ...``, ``--name=value``, ``--switch``.

    Raises:
        ValueError: a word stands before the first flag.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._values: dict[str, list[str]] = {}
        values: list[str] | None = None
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word.partition("=")
                values = [value] if equals else []
                self._values.pop(name, None)
                self._values[name] = values
            elif values is None:
                raise ValueError(f"{word!r} stands where a flag (--name) was expected")
            else:
                values.append(word)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        """All of them."""
        return list(self._values)

    @property
    def words(self) -> list[str]:
        """As a command has them."""
        return [w for name, values in self._values.items() for w in (name, *values)]

    def copy(self) -> Flags:
        """Another one with the same flags."""
        return Flags(self.words)

    def text(self, name: str) -> str:
        """``--name values`` as the command has it."""
        return " ".join((name, *self._values[name]))

    def values(self, name: str) -> list[str]:
        """What follows a flag; nothing where it is absent."""
        return self._values.get(name, [])

    def number(self, name: str, default: int) -> int:
        """A flag's one whole number.

        Raises:
            ValueError: it has another value.
        """
        values = self.values(name)
        if not values:
            return default
        try:
            return int(values[0])
        except ValueError:
            raise ValueError(f"{self.text(name)}: not a whole number") from None

    @property
    def slices(self) -> tuple[int, bool] | None:
        """Into how many slices sequences are cut, and whether they have packed documents; None:
        into none."""
        count = self.number("--pp-slices", 1)
        if count == 1:
            return None
        return count, bool(self.matching(PACKED))

    def set(self, name: str, *values: object) -> None:
        """Give a flag these values, where it stands or at the end."""
        self._values[name] = [str(value) for value in values]

    def drop(self, *names: str) -> None:
        """Remove flags, where they are."""
        for name in names:
            self._values.pop(name, None)

    def matching(self, prefixes: Sequence[str]) -> list[str]:
        """The names that start with one of ``prefixes``."""
        return [name for name in self._values if name.startswith(tuple(prefixes))]

    def neutral(self, name: str) -> bool:
        """True for a flag whose value means that it is not in use."""
        return " ".join(self.values(name)) in NEUTRAL.get(name, ())

    def of_kind(self, *kinds: str) -> list[str]:
        """The names of these kinds."""
        return [name for name in self._values if kind_of(name) in kinds]


def is_layout(name: str) -> bool:
    """True for a flag that divides or orders the work, stock's or ours."""
    return kind_of(name) in (LAYOUT, OURS)
