"""User-facing errors."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A wrong combination of flags, model and schedule, found before training starts.

    The text is one sentence with the numbers, the rule and the fix.
    """


@contextmanager
def named_errors(what: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Errors of a ``kind`` inside name ``what`` they are about, for the user.

    Raises:
        ConfigError: in place of one.
    """
    try:
        yield
    except kind as error:
        raise ConfigError(f"{what}: {error}") from None
