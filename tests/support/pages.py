"""The pages, the commands on them, and which of those a test cannot run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# First words by which an indented line is a command, not a formula or a file.
_COMMANDS = re.compile(r"(megatron-ext|torchrun|python3?|pip|\./?scripts/\S+|scripts/\S+|sbatch) ")


@dataclass(frozen=True)
class Command:
    """One logical line of a shell, and where it stands."""

    page: str
    line: int
    text: str

    @property
    def bare(self) -> str:
        """Without its comment, in one line."""
        text = re.sub(r"\s#\s.*", "", self.text)
        return re.sub(r"\s*\\?\n\s*", " ", text).strip()


def name_of(page: Path) -> str:
    """A page's path as people write it."""
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[Command]:
    """All commands of a page: of fenced ``bash`` blocks, and indented ones that start with ours."""
    found: list[Command] = []
    fence, pending, start = None, "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
            assert not pending, f"{page}:{number}: a command is not complete"
            continue
        if fence == "bash":
            if not pending:
                start = number
            pending = f"{pending}\n{line}" if pending else line
            if line.endswith("\\") or pending.count("(") > pending.count(")"):
                continue
            if pending.strip() and not pending.startswith("#"):
                found.append(Command(name_of(page), start, pending))
            pending = ""
        elif fence is None and line.startswith("    ") and (pending or _COMMANDS.match(line[4:])):
            if not pending:
                start = number
            pending = f"{pending}\n{line[4:]}" if pending else line[4:]
            if not line.endswith("\\"):
                found.append(Command(name_of(page), start, pending))
                pending = ""
    return found


# What is not run -> why. A pattern is matched at the start of a command without its comment.
NOT_RUN = {
    r"torchrun --nproc-per-node \d+ Megatron-LM/pretrain_gpt.py": "needs GPUs; the launcher's line "
    "beside it runs with the same flags",
    r"megatron-ext \w+ .*…": "a pattern: the user's own flags belong there",
    r"DEVICE=cpu .*scripts/sweep_schedules.sh": "tests/campaigns/test_scripts.py runs the sweep",
    r"torchrun .*(…|<your usual flags>)": "a pattern: the user's own flags belong there",
    r'torchrun --nproc-per-node 4 \S+ megatron_ext.launch .* "\$\{FLAGS\[@\]\}"$': "run by a test "
    "of its own, with torchrun itself",
    r"python3\.12 -m venv": "needs a package index",
    r"python -m venv": "needs a package index",
    r"pip install": "needs a package index",
    r"\./scripts/(demo|test)\.sh": "takes minutes; continuous integration runs test.sh itself",
    r"pytest": "is this",
    r"megatron-ext prove": "takes a minute; tests/checkout/test_prove.py runs it",
    r"make (lint|test-fast|test)": "scripts/test.sh runs the same",
    r"make (docs|reference)": "needs a package index, or torch; tests compare the reference pages",
    r"pre-commit install": "changes the hooks of this clone",
    r"export (MEGATRON_LM|DATA_PATH|CONTAINER_IMAGE)=": "of a cluster's file system",
    r"sbatch ": "needs a cluster; tests/campaigns/test_scripts.py has a stand-in",
}


def reason(command: Command) -> str | None:
    """Why ``command`` is not run; None if it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command.bare)), None)
