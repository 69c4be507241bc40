"""What ``scripts/upgrade_check.sh`` runs: hooks and patches on one Megatron after the other.

    python -m scripts.upgrade_check [--page FILE] [--json FILE] -- installed= NAME=CHECKOUT ...

Each Megatron is looked at in a process of its own: every hook of every feature is found, bound and
taken back, and a copy is patched and reverted. Then each is compared with the one before.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import hashlib
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext import patching
from megatron_ext.commands.doctor import facts_of, probe

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = "installed"
SECONDS = 300
_ADVICE = (
    "look for what took its place in that version, then give the hook another target or another "
    "set of parameters in megatron_ext/integration, for this version beside the old ones; until "
    "then runs that need this hook are refused before training"
)


# --- One Megatron, in a process of its own ------------------------------------------------------


class Binder(probe.Recorder):
    """Notes what each hook finds, binds it, takes it back.

    Attributes:
        entries: by first target.
    """

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.entries: dict[str, Any] = {}
        self._before: dict[str, Any] = {}

    def apply(self, hooks: Sequence[Any]) -> None:
        """See ``Hooks``; hooks that do not fit are noted and left out."""
        super().apply(hooks)
        for hook in hooks:
            entry = self.entries.setdefault(hook.target.places[0], {})
            entry |= {"why": hook.why, "needs": list(hook.target.parameters)}
            entry["error"] = self.found[hook.target]

    def look(self, hook: Any) -> None:
        """Find it, describe what is there, and bind it."""
        target = self.hooks.find(hook)
        held = _held(target)
        self.entries[hook.target.places[0]] = {"target": target, **describe(held)}
        self._before.setdefault(target, held)
        self.hooks.apply([hook])

    def take_back(self) -> list[str]:
        """Revert; returns targets that did not get their original back, or never were ours."""
        bound = {binding.target for binding in self.hooks.bindings}
        wrong = [t for t in bound if _held(t) is self._before[t]]
        self.hooks.revert()
        return wrong + [t for t, held in self._before.items() if _held(t) is not held]


def _held(target: str) -> Any:
    module, _, path = target.partition(":")
    owner: Any = sys.modules[module]
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name)


def describe(held: Any) -> dict[str, str]:
    """Signature and a hash of the code, without comments, documentation and layout."""
    inner = inspect.unwrap(held) if callable(held) else held
    try:
        signature = str(inspect.signature(inner))
    except (TypeError, ValueError):
        signature = ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    except (OSError, TypeError, SyntaxError):
        return {"signature": signature, "body": ""}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        text = first.value if isinstance(first, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            text.value = ""
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return {"signature": signature, "body": digest[:12]}


def hooks_here() -> dict[str, Any]:
    """Every hook of every feature, on the Megatron that is importable."""
    from megatron_ext import cpu

    cpu.install()
    import megatron.training.training  # noqa: F401
    from megatron.core import package_info

    from megatron_ext.integration import entry_point
    from megatron_ext.integration.versions import ConfigError, untested

    version = str(package_info.__version__)
    result: dict[str, Any] = {"version": version, "hooks": {}, "not_restored": []}
    try:
        result["note"] = "newer than tested" if untested(version) else ""
    except ConfigError:
        result["note"] = "not supported"
    module: Any = entry_point
    module.require_supported = lambda found: None  # to look at unsupported versions too
    for group, binder in probe.looked(lambda: Binder(version)):
        if binder.error is not None:
            all_of_it = {"error": binder.error, "why": "all of it", "needs": []}
            binder.entries[f"({group})"] = all_of_it
        result["not_restored"] += binder.take_back()
        for target, entry in binder.entries.items():
            known = result["hooks"].setdefault(target, {**entry, "groups": []})
            known["groups"].append(group)
    return result


def patches_of(checkout: Path) -> dict[str, Any]:
    """Patch a copy of the one file that has our lines, and revert it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        try:
            for name in (patching.FILE, patching.PACKAGE_INFO):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / name, copy / name)
            patching.apply(copy)
            patching.revert(copy)
        except (OSError, patching.PatchError) as error:
            return {"state": "does not fit", "error": str(error).replace(folder, str(checkout))}
        same = (copy / patching.FILE).read_bytes() == (checkout / patching.FILE).read_bytes()
    error = None if same else "reverting did not restore the original bytes"
    return {"state": "applied and reverted", "error": error}


# --- All of them --------------------------------------------------------------------------------


def look_at(name: str, checkout: str) -> dict[str, Any]:
    """One Megatron; ``error`` if it cannot be looked at at all."""
    path = os.pathsep.join(filter(None, (checkout, str(ROOT))))
    command = [sys.executable, "-W", "ignore", "-m", "scripts.upgrade_check", "--one"]
    entry: dict[str, Any] = {"name": name, "commit": _commit(checkout) if checkout else None}
    found = facts_of(command, SECONDS, PYTHONPATH=path, OMP_NUM_THREADS="1")
    if "error" in found:
        return {**entry, "error": f"it cannot be looked at: {found['error']}"}
    entry |= {**found, "error": None}
    if checkout:
        entry["patches"] = patches_of(Path(checkout))
    return entry


def _commit(checkout: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", checkout, "log", "-1", "--format=%h of %cs"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def moved(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two Megatrons in what our hooks stand on."""
    lines = []
    for target, entry in new["hooks"].items():
        before = old["hooks"].get(target)
        name = target.split(":")[-1]
        if entry["error"] is not None or before is None or before["error"] is not None:
            continue
        if before["target"] != entry["target"]:
            lines.append(f"`{name}` moved from {before['target']} to {entry['target']}")
        elif before["signature"] != entry["signature"]:
            lines.append(f"`{name}`: {_parameters(before['signature'], entry['signature'])}")
        elif before["body"] != entry["body"]:
            lines.append(f"`{name}`: other code behind the same signature")
    return lines


def _parameters(old: str, new: str) -> str:
    names = []
    for text in (old, new):
        try:
            arguments = ast.parse(f"def f{text.split(' ->')[0]}: ...").body[0].args  # type: ignore[attr-defined]
            names.append({a.arg for a in (*arguments.posonlyargs, *arguments.args,
                                          *arguments.kwonlyargs)})  # fmt: skip
        except SyntaxError:
            return "another signature"
    gone, come = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    parts = [f"lost {', '.join(gone)}"] * bool(gone) + [f"gained {', '.join(come)}"] * bool(come)
    return "signature " + ("; ".join(parts) or "with the same names in another form")


def problems(entry: dict[str, Any]) -> list[str]:
    """Sentences on what does not fit."""
    name = entry["name"]
    if entry["error"] is not None:
        return [f"{name}: {entry['error']}"]
    found = [
        f"{name}: {hook['error']}; {_ADVICE}"
        for hook in entry["hooks"].values()
        if hook["error"] is not None
    ]
    found += [f"{name}: {target} was not given back" for target in entry["not_restored"]]
    error = entry.get("patches", {}).get("error")
    if error:
        found.append(f"{name}: {error}; give megatron_ext/patching.py another place for its lines")
    return found


def page(entries: list[dict[str, Any]]) -> str:
    """The result as a page."""
    lines = [
        "# Hooks and patches on every supported Megatron, and on main",
        "",
        f"Run of {datetime.date.today().isoformat()} with `scripts/upgrade_check.sh` (Python "
        f"{sys.version.split()[0]}).",
        "",
        "| Megatron | version | commit | hooks that fit | patches |",
        "|---|---|---|---|---|",
    ]
    for entry in entries:
        if entry["error"] is not None:
            lines.append(f"| {entry['name']} | | {entry['commit'] or ''} | {entry['error']} | |")
            continue
        total = len(entry["hooks"])
        good = sum(hook["error"] is None for hook in entry["hooks"].values())
        text = entry.get("patches", {}).get("state", "")
        note = f" ({entry['note']})" if entry["note"] else ""
        version, commit = entry["version"].split("+")[0] + note, entry["commit"] or ""
        lines.append(f"| {entry['name']} | {version} | {commit} | {good} of {total} | {text} |")
    wrong = [line for entry in entries for line in problems(entry)]
    lines += ["", "## What does not fit", ""]
    lines += [f"- {line}" for line in wrong] or ["Nothing."]
    lines += ["", "## What moved, from each to the next", ""]
    rows = [e for e in entries if e["error"] is None and e["name"] != INSTALLED]
    for old, new in itertools.pairwise(rows):
        lines.append(f"{old['name']} to {new['name']}:")
        lines += ["", *(f"- {line}" for line in moved(old, new) or ["nothing"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Look at all that the command line names; exit status 1 if something does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, help="write the result as Markdown")
    parser.add_argument("--json", type=Path, help="write all that was found")
    parser.add_argument("megatrons", nargs="*", metavar="NAME=CHECKOUT")
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            result = json.dumps(hooks_here())
        print(f"\n{result}", flush=True)
        os._exit(0)
    entries = []
    for given in options.megatrons:
        name, _, checkout = given.partition("=")
        print(f"upgrade_check: {name}", file=sys.stderr, flush=True)
        entries.append(look_at(name, checkout))
    text = page(entries)
    print(text)
    if options.page is not None:
        options.page.write_text(text)
    if options.json is not None:
        options.json.write_text(json.dumps(entries, indent=1) + "\n")
    return 1 if any(problems(entry) for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
