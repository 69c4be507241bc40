"""Shorter forms of what a configuration says of its layers, one by one."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..plan.layout import expanded
from ..plan.pattern import listed


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
    try:
        items = listed(text)
    except ValueError:
        raise ValueError(f"{text}: neither a number nor a list of 0 and 1") from None
    if isinstance(items, int):
        return str(min(items, max(1, number // 2)))
    return "[" + ",".join(sample([str(item) for item in items], number)) + "]"


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
    return [re.sub(r"[^EtmL]", "", part) for part in expanded(text).split("|")]


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
