"""Colours and names of passes in every picture.

Blue F, warm B, green W as in the papers; a rank's first chunk is dark, its last one light.
"""

from __future__ import annotations

from ..schedule.actions import Op, Operation
from ..schedule.vocabulary import VocabularyOp

DARK: dict[Operation, str] = {
    Op.F: "#2e6bb0",
    Op.B: "#c96a12",
    Op.W: "#2a8c67",
    Op.BW: "#b5483a",
    VocabularyOp.S: "#7a3b8f",
    VocabularyOp.T: "#a8577e",
    VocabularyOp.E: "#5b6770",
    VocabularyOp.G: "#8a949c",
}
MEANING: dict[Operation, str] = {
    Op.F: "F forward",
    Op.B: "B input gradient",
    Op.W: "W weight gradient",
    Op.BW: "BW whole backward",
    VocabularyOp.S: "S logits of the rank's vocabulary",
    VocabularyOp.T: "T their weight gradient",
    VocabularyOp.E: "E embeddings",
    VocabularyOp.G: "G their gradient",
}
COPIES = {Op.OFFLOAD: "#7a5aa6", Op.RELOAD: "#b39ddb"}
COPY_MEANING = {Op.OFFLOAD: "to host", Op.RELOAD: "to device"}

INK, SOFT, IDLE, GRID = "#1f2933", "#64707d", "#e9ecf0", "#cfd5dc"
AREA, LINE, MEASURED = "#c3d0e2", "#3d5a80", "#b5483a"
GROUND, STRIP = "#ffffff", "#f5f6f8"

# What a dark ground changes; passes keep their colours.
_ON_DARK = (
    f'svg{{fill:#e6ebf0}}rect[fill="{GROUND}"]{{fill:#12171d}}text[fill="{INK}"]{{fill:#e6ebf0}}'
    f'text[fill="{SOFT}"]{{fill:#9fabb7}}path[stroke="{SOFT}"]{{stroke:#9fabb7}}'
    ".idle{fill:#242c35}.strip{fill:#1b222a}.area{fill:#2c4468;stroke:#8fb3e0}"
    ".line{stroke:#ef8d7c}.peak{stroke:#e6ebf0}"
    f'circle[fill="{GROUND}"]{{fill:#12171d}}[stroke="{GRID}"]{{stroke:#3a4550}}'
    '[stroke="#16202a"]{stroke:#e6ebf0}circle[fill="#16202a"]{fill:#e6ebf0}'
)


def theme_style(theme: str) -> str:
    """CSS of an SVG's theme: ``auto`` follows the reader's, ``light`` and ``dark`` are fixed."""
    if theme == "light":
        return ""
    return _ON_DARK if theme == "dark" else f"@media(prefers-color-scheme:dark){{{_ON_DARK}}}"


def shades(op: Operation, chunks: int) -> list[str]:
    """The colour of an operation for each chunk, mixed with more white up to the last one."""
    return [_shade(DARK[op], chunk, chunks) for chunk in range(chunks)]


def _shade(color: str, chunk: int, chunks: int) -> str:
    white = 0.0 if chunks == 1 else 0.42 + 0.26 * chunk / (chunks - 1) if chunk else 0.0
    rgb = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in rgb)
