"""The flags of a training command, in order."""

from __future__ import annotations

from collections.abc import Iterable


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
        """All names."""
        return list(self._values)

    @property
    def words(self) -> list[str]:
        """Names and values as a command has them."""
        return [w for name, values in self._values.items() for w in (name, *values)]

    def copy(self) -> Flags:
        """Another one with the same flags."""
        return Flags(self.words)

    def text(self, name: str) -> str:
        """``--name values`` as the command has it."""
        return " ".join((name, *self._values[name]))

    def values(self, name: str) -> list[str]:
        """Values of a flag; none where it is absent."""
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

    def append(self, name: str, *values: object) -> None:
        """Give a flag these values, at the end of the line."""
        self._values.pop(name, None)
        self._values[name] = [str(value) for value in values]

    def drop(self, *names: str) -> None:
        """Remove flags, where they are."""
        for name in names:
            self._values.pop(name, None)

    def matching(self, *prefixes: str) -> list[str]:
        """The names that start with one of ``prefixes``."""
        return [name for name in self._values if name.startswith(prefixes)]
