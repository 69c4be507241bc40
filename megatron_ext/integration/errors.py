"""User-facing errors."""


class ConfigError(ValueError):
    """A wrong combination of flags, model and schedule, found before training starts.

    The text is one sentence with the numbers, the rule and the fix.
    """
