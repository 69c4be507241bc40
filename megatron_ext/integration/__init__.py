"""The only part that knows Megatron: flags, hooks, V placement, the forward-backward function."""

from .errors import ConfigError
from .install import Installation, apply, install, revert
from .report import Report

__all__ = ["ConfigError", "Installation", "Report", "apply", "install", "revert"]
