"""Kinds of all layers, from Megatron's flags: hybrid patterns, frequencies, prediction depths."""

from __future__ import annotations

import ast
from typing import Any

from .._input import shown
from .model import PlanError

HYBRID = "MG*+-E"  # symbols of --hybrid-layer-pattern that are modelled


def layer_kinds(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a job that describe its layers.

    Args:
        given: Megatron's arguments by name.

    Raises:
        PlanError: a pattern that cannot be read, of another length, or of what is not modelled.
    """
    pattern = given.get("hybrid_layer_pattern") or given.get("hybrid_override_pattern")
    if pattern is not None:
        return _hybrid(str(pattern), given)
    layers = given["num_layers"]
    mixers = _mixers(given, layers)
    experts = given.get("num_experts") or 0
    frequency = given.get("moe_layer_freq")
    with_experts = [False] * layers
    if experts:
        with_experts = _frequency("--moe-layer-freq", frequency or "1", layers, _every_first)
    kinds = tuple(m + ("E" if moe else "-") for m, moe in zip(mixers, with_experts))
    # Megatron's prediction layers are like the last decoder layer.
    depths = given.get("mtp_num_layers") or 0
    return {
        "num_layers": layers,
        "layers": kinds,
        "mtp_layers": kinds[-1:] * depths,
        "window": _window(given),
    }


def _hybrid(pattern: str, given: dict[str, Any]) -> dict[str, Any]:
    """``MAIN/DEPTH/DEPTH``, with ``|`` between stages of the main part."""
    main, *depths = pattern.split("/")
    unknown = sorted(set(pattern) - set(HYBRID) - set("|/"))
    if unknown:
        raise PlanError(
            f"--hybrid-layer-pattern {shown(pattern)}: plan models the layers {' '.join(HYBRID)}, "
            f"not {' '.join(unknown)}"
        )
    if (given.get("mtp_num_layers") or 0) > 0 and not depths:
        raise PlanError(
            "--mtp-num-layers beside --hybrid-layer-pattern needs the layers of each depth in the "
            "pattern, after /; give them there"
        )
    stages = [len(stage) for stage in main.split("|")]
    layers = tuple(main.replace("|", ""))
    if not layers:
        raise PlanError(f"--hybrid-layer-pattern {shown(pattern)} has no layers")
    return {
        "num_layers": len(layers),
        "layers": layers,
        "mtp_layers": tuple(depths),
        "segments": tuple(stages) if len(stages) > 1 else None,
        "hybrid": True,
        "window": None,
    }


def _mixers(given: dict[str, Any], layers: int) -> list[str]:
    """Attention, or what is in its place, of every layer."""
    usual = "+" if given.get("multi_latent_attention") else "*"
    window = given.get("window_size") is not None and usual == "*"
    if window:
        skip = given.get("window_attn_skip_freq")
        windowed = [True] * layers
        if skip is not None:
            windowed = _frequency("--window-attn-skip-freq", skip, layers, _all_but_every)
        mixers = ["w" if one else "*" for one in windowed]
    else:
        mixers = [usual] * layers
    variant = given.get("experimental_attention_variant")
    if variant is None:
        return mixers
    if variant not in ("gdn", "gated_delta_net"):
        raise PlanError(
            f"--experimental-attention-variant {variant} keeps and computes other tensors, which "
            "plan does not model; leave it out and read the numbers as a lower bound"
        )
    text = given.get("linear_attention_freq")
    if text is None:
        raise PlanError(f"--experimental-attention-variant {variant} needs --linear-attention-freq")
    linear = _frequency("--linear-attention-freq", text, layers, _all_but_every)
    return ["G" if one else mixer for one, mixer in zip(linear, mixers)]


def _every_first(number: int, every: int) -> bool:
    return number % every == 0


def _all_but_every(number: int, every: int) -> bool:
    return (number + 1) % every != 0


def _frequency(flag: str, value: Any, layers: int, rule: Any) -> list[bool]:
    """N, or a Python list expression such as ``([0]*1+[1]*3)``.

    Args:
        value: as text, or as Megatron parses it.
        rule: of a layer's number, from 0, and N.
    """
    text = str(value)
    try:
        pattern = listed(text)
    except ValueError:
        raise PlanError(f"{flag} must be N or a list like ([0]*1+[1]*3), got {text!r}") from None
    if isinstance(pattern, int):
        if pattern < 1:
            raise PlanError(f"{flag} must be N >= 1 or a list, got {text!r}")
        return [rule(number, pattern) for number in range(layers)]
    if len(pattern) != layers:
        raise PlanError(f"{flag} lists {len(pattern)} layers, but there are {layers}")
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
