"""Generators: from a name, a pipeline size and a number of microbatches to a schedule."""

from .forward import forward_only
from .made import BrokenGenerator, generated_by
from .registry import (
    GENERATORS,
    MOST_SECONDS,
    MOST_SETS,
    NAMES,
    Generator,
    check_sizes,
    generate,
)
from .request import Request, default_effort

__all__ = [
    "GENERATORS",
    "BrokenGenerator",
    "MOST_SECONDS",
    "MOST_SETS",
    "NAMES",
    "Generator",
    "Request",
    "check_sizes",
    "default_effort",
    "forward_only",
    "generate",
    "generated_by",
]
