"""The only part that knows Megatron: flags, hooks, V placement, the forward-backward function."""

from .errors import ConfigError
from .hooks import Report
from .install import Installation, apply, install, revert

__all__ = ["ConfigError", "Installation", "Report", "apply", "install", "revert"]
