"""The only part that knows Megatron: flags, seams, V placement, the forward-backward function."""

from .errors import ConfigError
from .install import Installation, install

__all__ = ["ConfigError", "Installation", "install"]
