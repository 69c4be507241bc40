"""A copy of the package with one schedule more, by the recipe of docs/develop/extending.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import ROOT

REGISTRY = "megatron_ext/schedule/generators/registry.py"
# The recipe: one module, one import, one entry. The first of the registry, so that ``auto`` takes
# it where it is as fast as v-zb, whose order it has.
MODULE = '''"""A stand-in for a new schedule."""

from .blocks import VEES


def stand_in(request):
    return request.tasks.actions(VEES["v-zb"].rows(request.pp, request.microbatches))
'''
IMPORT = "from .stand_in import stand_in\n"
ENTRY = '    "stand-in": Generator(stand_in, "vee", 2, False, True, "as v-zb"),\n'

Run = Callable[..., str]


def copy_with_stand_in(folder: Path) -> Run:
    """What runs Python on a copy in ``folder``, and gives its standard output."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_ext", folder / "megatron_ext", ignore=ignore)
    (folder / REGISTRY).with_name("stand_in.py").write_text(MODULE)
    text = (folder / REGISTRY).read_text()
    for mark, added in (("from .request", IMPORT), ('    "1f1b": Generator', ENTRY)):
        assert text.count(mark) == 1
        text = text.replace(mark, added + mark)
    (folder / REGISTRY).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
