"""User-facing errors; the integration passes their sentence on."""


class OffloadConfigError(ValueError):
    """Flags, machine and schedule do not fit: one sentence with numbers, rule and fix."""
