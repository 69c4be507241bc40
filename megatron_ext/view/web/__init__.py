"""Scripts and styles of the pages, and how a page is put together."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


def asset(name: str) -> str:
    """The text of a file of this package."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON that can stand in a script element of a page."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def document(title: str, body: str, styles: str, scripts: str, data: Mapping[str, Any]) -> str:
    """One HTML file that loads nothing from elsewhere.

    Args:
        title: of the window, plain text.
        body: HTML.
        styles, scripts: added to the timeline viewer's.
        data: name of a constant -> what the scripts find under it.
    """
    constants = "\n".join(f"const {name} = {embedded(value)};" for name, value in data.items())
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>\n{asset('viewer.css')}{styles}</style>\n</head>\n<body>",
            body,
            "<noscript>This page draws with JavaScript; without it, ask for an SVG.</noscript>",
            f"<script>\n{asset('viewer.js')}\n{constants}\n{scripts}\n</script>\n</body>\n</html>\n",
        ]
    )
