"""Kinds of all layers, from Megatron's flags: frequencies, prediction depths."""

from __future__ import annotations

import ast
from typing import Any

from .._input import shown
from .model import PlanError


def layer_kinds(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a job that describe its layers.

    Args:
        given: Megatron's arguments by name.

    Raises:
        PlanError: a list that cannot be read, or of another length.
    """
    layers = given["num_layers"]
    mixer = "+" if given.get("multi_latent_attention") else "*"
    experts = given.get("num_experts") or 0
    frequency = given.get("moe_layer_freq")
    with_experts = [False] * layers
    if experts:
        with_experts = _with_experts(frequency or "1", layers)
    kinds = tuple(mixer + ("E" if moe else "-") for moe in with_experts)
    # Megatron's prediction layers are like the last decoder layer.
    depths = given.get("mtp_num_layers") or 0
    return {
        "layers": kinds,
        "mtp_layers": kinds[-1:] * depths,
        "window": _window(given),
    }


def _with_experts(value: Any, layers: int) -> list[bool]:
    """The layers of ``--moe-layer-freq``: every N-th, or a list such as ``([0]*1+[1]*3)``.

    Args:
        value: as text, or as Megatron parses it.
    """
    text = str(value)
    try:
        pattern = listed(text)
    except ValueError:
        raise PlanError(
            f"--moe-layer-freq must be N or a list like ([0]*1+[1]*3), got {text!r}"
        ) from None
    if isinstance(pattern, int):
        if pattern < 1:
            raise PlanError(f"--moe-layer-freq must be N >= 1 or a list, got {text!r}")
        return [number % pattern == 0 for number in range(layers)]
    if len(pattern) != layers:
        raise PlanError(f"--moe-layer-freq lists {len(pattern)} layers, but there are {layers}")
    return [bool(x) for x in pattern]


def listed(text: str) -> int | list[int]:
    """The value of N, or of a list such as ``([0]*3+[1]*58)``: lists of whole numbers, ``+`` and
    ``*``; nothing else is evaluated.

    Raises:
        ValueError: it is neither, or is longer than ``_LONGEST``.
    """
    try:
        found: int | list[int] = _expression(ast.parse(text, mode="eval").body)
        return found
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{shown(text)} is neither N nor a list of whole numbers") from None


def _expression(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        found = [_expression(x) for x in node.elts]
        if all(isinstance(x, int) for x in found):
            return found
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _expression(node.left), _expression(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        times, items = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(items, list) and times * len(items) > _LONGEST:
            raise ValueError(f"a list of more than {_LONGEST} layers")
        return left * right
    raise ValueError(ast.dump(node))


_LONGEST = 100_000  # layers


def _window(given: dict[str, Any]) -> int | None:
    """``--window-size BEFORE,AFTER`` in tokens, the token itself included; None for no window."""
    value = given.get("window_size")
    if value is None:
        return None
    try:
        before, _ = (int(part) for part in str(value).strip("()").split(","))
    except ValueError:
        raise PlanError(f"--window-size must be BEFORE,AFTER, got {value!r}") from None
    return None if before < 0 else before + 1
