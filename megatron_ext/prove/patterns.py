"""Shorter forms of what a configuration says of its layers, one by one."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple


class Stages(NamedTuple):
    """A pipeline's ``ranks`` and model ``chunks`` on each."""

    ranks: int
    chunks: int

    @property
    def number(self) -> int:
        """Stages in all."""
        return self.ranks * self.chunks


def sample(items: list[str], number: int) -> list[str]:
    """``number`` of ``items`` in their order, first and last among them, every kind if it can be.

    A kind that an even choice would miss takes the place of one that is there twice.
    """
    if number >= len(items):
        return items + items[-1:] * (number - len(items))
    if number == 1:
        return items[:1]
    chosen = [round(i * (len(items) - 1) / (number - 1)) for i in range(number)]
    for kind in dict.fromkeys(items):
        if any(items[at] == kind for at in chosen):
            continue
        at = items.index(kind)
        for i, old in enumerate(chosen):
            if sum(items[other] == items[old] for other in chosen) > 1:
                chosen[i] = at
                break
    return [items[at] for at in sorted(chosen)]


def frequencies(text: str, number: int) -> str:
    """A layer frequency (``2``, or a Python list of 0 and 1) for ``number`` layers.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(r"\d+", text):
        return str(min(int(text), max(1, number // 2)))
    try:
        items = _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text}: neither a number nor a list of 0 and 1") from None
    return "[" + ",".join(sample([str(item) for item in items], number)) + "]"


def _list(node: ast.expr) -> list[int]:
    """The value of ``([0]*3+[1]*58)``: lists of numbers, ``+`` and ``*``, nothing else."""
    if isinstance(node, ast.List):
        return [_int(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list(node.left) + _list(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = node.left, node.right
        if isinstance(left, ast.Constant):
            left, right = right, left
        return (_list(left) * min(1000, _int(right)))[:1000]
    raise ValueError(f"{ast.unparse(node)}: neither a number nor a list of 0 and 1")


def _int(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
        return node.value
    raise ValueError(f"{ast.unparse(node)}: not a whole number")


def layout(text: str, stages: Stages) -> tuple[str, int]:
    """A pipeline layout (``Et*3|(tt|)*29,m|L``) of so many stages, and its decoder layers.

    First and last stage stay what they are, those between are chosen evenly; runs of layers keep
    one layer, or two where the longest stage has at least twice those of the shortest that has any.
    """
    given = stages_of(text)
    counts = [stage.count("t") for stage in given if "t" in stage]
    uneven = bool(counts) and max(counts) >= 2 * min(counts)
    parts = []
    for stage in sample(given, stages.number):
        number = stage.count("t")
        most = 2 if uneven and number == max(counts) else 1
        head, _, tail = stage.partition("t")
        parts.append(head + "t" * min(number, most) + tail.replace("t", ""))
    return "|".join(parts), sum(part.count("t") for part in parts)


def stages_of(text: str) -> list[str]:
    """The stages of a pipeline layout, repetitions written out."""
    return [re.sub(r"[^EtmL]", "", part) for part in _expand(text).split("|")]


def _expand(text: str) -> str:
    """Without commas, repetitions written out: innermost brackets first."""
    text = text.replace(",", "").replace(" ", "")
    group = re.compile(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)")
    while match := group.search(text):
        body, times = match.group(1) or match.group(3), match.group(2) or match.group(4)
        text = text[: match.start()] + body * min(1000, int(times)) + text[match.end() :]
    return text


def hybrid(text: str, stages: Stages) -> tuple[str, int]:
    """A hybrid model's pattern of letters with so many layers as stages, or as kinds of layers.

    A multi-token prediction part after ``/`` stays as it is.
    """
    main, slash, rest = text.partition("/")
    letters = [*main.replace("|", "")]
    kinds = len(set(letters))
    number = stages.number * max(1, -(-kinds // stages.number))
    chosen = sample(letters, min(len(letters), number))
    if "|" in main:
        each = max(1, len(chosen) // stages.number)
        parts = [chosen[i : i + each] for i in range(0, len(chosen), each)]
        return "|".join("".join(part) for part in parts) + slash + rest, len(chosen)
    return "".join(chosen) + slash + rest, len(chosen)
