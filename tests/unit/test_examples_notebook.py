"""The notebook of ``examples``: its cells run on a bare Python, and print what is stored in it.

UPDATE_GOLDEN=1 stores the outputs anew. Of pictures it is only tested that they are stored and can
be drawn: their looks may change.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "schedules.ipynb"
MOST_BYTES = 200_000


def run(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Execute one cell as Jupyter does: what it prints, and the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue(), value


def outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What Jupyter would store of one cell."""
    text, value = run(source, names)
    found: list[dict[str, Any]] = []
    if text:
        lines = text.splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"image/svg+xml": value._repr_svg_().splitlines(keepends=True)}
        found.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return found


def text_of(output: dict[str, Any]) -> str:
    """What a reader reads: the text, or that there is a picture."""
    if "text" in output:
        return "".join(output["text"])
    return "".join(output["data"]["image/svg+xml"])[:5]


@pytest.mark.usefixtures("full_effort")
@pytest.mark.matrix
def test_cells_print_what_is_stored() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 8
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        found = outputs("".join(cell["source"]), names, number)
        if os.environ.get("UPDATE_GOLDEN"):
            cell["outputs"], cell["execution_count"] = found, number
        assert cell["execution_count"] == number
        assert list(map(text_of, cell["outputs"])) == list(map(text_of, found)), cell["id"]
    if os.environ.get("UPDATE_GOLDEN"):
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    pictures = [o for cell in cells for o in cell["outputs"] if text_of(o) == "<svg "]
    assert len(pictures) >= 4
    assert NOTEBOOK.stat().st_size < MOST_BYTES


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: another number in an output fails it."""
    monkeypatch.delenv("UPDATE_GOLDEN", raising=False)
    text = NOTEBOOK.read_text()
    monkeypatch.setattr(
        type(NOTEBOOK), "read_text", lambda self: text.replace("bubble  ", "bubble 1")
    )
    with pytest.raises(AssertionError, match="cell-"):
        test_cells_print_what_is_stored()


def test_the_notebook_needs_no_packages() -> None:
    """As on a machine with nothing installed: without site-packages."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True, capture_output=True)
