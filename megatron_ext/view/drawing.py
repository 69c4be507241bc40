"""Elements of SVG files, written here for every picture."""

from __future__ import annotations

import html
import math
from collections.abc import Callable

from .palette import GROUND, INK

FONT = "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif}"


def short(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(name: str, body: str | None = None, **attributes: object) -> str:
    """One element around ``body``, which is markup.

    Args:
        attributes: in their order, ``_`` for a hyphen; those that are "" are left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value}"'
        for key, value in attributes.items()
        if value != ""
    )
    return f"<{name}{given}/>" if body is None else f"<{name}{given}>{body}</{name}>"


def round_step(span: float, most: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that goes at most ``most`` times into
    ``span``, which is above 0."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= most)


class Drawing:
    """One SVG, all sizes in px.

    Attributes:
        parts: its elements, the first at the bottom.
        number: how coordinates of text are written.
        attributes, weight, space: of the file, and of every text that says nothing else.
    """

    number: Callable[[float], str] = staticmethod(short)
    ink, weight, space = INK, "", "preserve"

    def __init__(self) -> None:
        self.parts: list[str] = []

    def add(self, name: str, body: str | None = None, **attributes: object) -> None:
        """One ``element`` over the others."""
        self.parts.append(element(name, body, **attributes))

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = ""
    ) -> None:
        """A rectangle of a class; ``title`` is shown under the pointer."""
        body = element("title", html.escape(title)) if title else None
        sizes = {"x": x, "y": y, "width": width, "height": height}
        self.add("rect", body, class_=kind, **{key: short(size) for key, size in sizes.items()})

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float,
        anchor: str = "start",
        fill: str = INK,
        weight: str = "",
        kind: str = "",
    ) -> None:
        """One line of text; ``kind``: its class, by which the page's script moves it."""
        self.add(
            "text",
            html.escape(words),
            x=self.number(x),
            y=self.number(y),
            font_size=short(size),
            text_anchor=anchor,
            fill=fill,
            font_weight=weight or self.weight,
            class_=kind,
            **{"xml:space": self.space},
        )

    def document(self, title: str, width: float, height: float, style: str) -> str:
        """The file, on white, which loads nothing from elsewhere."""
        w, h = short(width), short(height)
        body = [
            element("title", html.escape(title)),
            element("style", FONT + style),
            element("rect", width=w, height=h, fill=GROUND),
            *self.parts,
        ]
        head = {"xmlns": "http://www.w3.org/2000/svg", "width": w, "height": h}
        head |= {"viewBox": f"0 0 {w} {h}", "fill": self.ink, "role": "img"}
        return element("svg", "\n".join(["", *body, ""]), **head) + "\n"
