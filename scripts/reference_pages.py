"""Writes the reference pages that code knows best: flags, refusals, command line, Python interface.

    python -m scripts.reference_pages             # all of them; needs torch, for flags and refusals
    python -m scripts.reference_pages cli api     # these two need a bare Python

Tests compare the pages with what this makes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext._conflict import Conflict
    from megatron_ext.commands.parser import Parser

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
WRITTEN = "`python -m scripts.reference_pages` writes this page; a test compares them."

# By the feature that declares them: the heading of its flags, and a page about it.
FEATURES = {
    "Schedule": ("The schedule", "../start/choosing.md"),
    "Slices": ("Slices of a sequence", "../concepts/slices.md"),
    "Lengths": ("Steps of varying lengths", "../guides/lengths.md"),
    "ProfileSteps": ("Measured pass times", "../concepts/schedules.md#measured-costs"),
    "Offload": ("Offloading activations", "../guides/offload.md"),
    "Recompute": ("Cheap recompute", "../guides/offload.md#cheap-recompute"),
    "PostValidation": ("Optimizer post-validation", "../guides/post-validation.md"),
    "VocabularyParallel": ("A sharded vocabulary", "../guides/vocabulary.md"),
    "MoE": ("MoE layers in chunks", "../guides/moe.md"),
    "Telemetry": ("Traces", "../guides/tracing.md"),
}
# Those that refuse options of Megatron and do not declare a flag with a heading of its own.
REFUSING = FEATURES | {
    "CudaGraphs": ("CUDA graphs", "features.md#cuda-graphs"),
    "Overlap": ("Passes in pairs", "../guides/overlap.md"),
    "SplitBackward": ("Weight gradients later", "../concepts/numerics.md"),
    "Checkpoint": ("Checkpoints", "../guides/checkpoints.md"),
    "VPlacement": ("V placement", "../concepts/schedules.md"),
}
ENVIRONMENT = {
    "MEGATRON_EXT_VERBOSE": "1: the log names every function that is replaced, and all details",
    "MEGATRON_EXT_TRACE": "1: every action is printed when it starts, for a run that hangs",
    "MEGATRON_EXT_WATCHDOG_SECONDS": "a rank without progress for this time reports and exits "
    "with status 75; default: `--distributed-timeout-minutes`, in a "
    "library the time limit of the process groups",
    "MEGATRON_EXT_AGREEMENT_SECONDS": "how long ranks wait for each other's settings before "
    "training; default 120",
    "MEGATRON_EXT_EFFORT": "seconds of search where neither `--pp-effort` nor `--effort` gives "
    "them; default 1",
    "MEGATRON_EXT_OFFLOAD_MIN_BYTES": "smaller tensors are never offloaded; default 65536, "
    "4096 in experts",
    "MEGATRON_EXT_DOCTOR_SECONDS": "time limit of each probe of `megatron-ext doctor`",
    "MEGATRON_EXT_CPU_CAPABILITY": "with `--device cpu`: the compute capability that scripts see, "
    "such as 9.0",
    "MEGATRON_LM": "the checkout that the launcher's word `pretrain_gpt` and `doctor` use",
}
INTERNAL = {"MEGATRON_EXT_STARTED", "MEGATRON_EXT_"}

# Public objects that are not classes or functions, so have no docstring of their own.
CONSTANTS = {
    "AUTO": "The name `auto`, for `select`.",
    "FILE_FORMAT": "The format's name in schedule files.",
    "GENERATORS": "Every schedule by name, with what its generator takes.",
    "NAMES": "The names of all schedules.",
    "AnyAction": "An `Action` or a `Joint`.",
}
# Packages of which modules are public rather than names of the package.
MODULES = ("megatron_ext.offload", "megatron_ext.moe")


def cell(text: str) -> str:
    """Text inside a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)]


def options(
    actions: Iterable[argparse.Action], needs: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """The name and the help of every option, as ``--help`` has them, and what it needs."""
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or action.dest.upper()
        if action.choices is not None and action.metavar is None:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        value = " ".join(value) if isinstance(value, tuple) else value
        value = "" if action.nargs == 0 else f"[{value}]" if action.nargs == "?" else value
        names = ", ".join(action.option_strings)
        text = (action.help or "") % {**vars(action), "prog": "megatron-ext"}
        needed = (needs or {}).get(action.dest)
        text += f"; needs `{needed}`" if needed else ""
        yield f"`{names} {value}`".replace(" `", "`").replace("` ", "`"), text


def cli() -> str:
    """The page of all commands."""
    lines = ["# The command line", "", WRITTEN, ""]
    lines += [
        "`megatron-ext COMMAND`, or `python3 -m megatron_ext COMMAND`. All commands run on a bare "
        "Python 3.10; `prove` needs torch and Megatron.",
        "",
        "Exit status: 0; 1 for a negative answer, such as `patch status` on an unpatched checkout "
        "or `check` of a schedule that cannot run; 2, with one sentence on stderr, where the input "
        "cannot be used or the answer not be written; 130 after Ctrl-C.",
        "",
    ]
    subparsers = commands()
    lines += table(("command", "what it does"), ((f"[`{n}`](#{n})", h) for n, h, _ in subparsers))
    for name, text, parser in subparsers:
        lines += ["", f"## {name}", "", f"{(parser.description or text).strip()}", ""]
        lines += table(("option", "meaning"), options(parser._actions, parser.needs))
    return "\n".join(lines) + "\n"


def commands() -> list[tuple[str, str, Parser]]:
    """Every command: its name, its one line, its parser."""
    from megatron_ext.cli import COMMANDS, make_parser

    (found,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return [(name, COMMANDS[name].help, one) for name, one in found.choices.items()]


def flags() -> str:
    """The page of flags, launcher options and environment variables."""
    from megatron_ext import launch
    from megatron_ext.integration.features import FEATURES as ALL
    from megatron_ext.integration.flags import FLAGS

    lines = ["# Flags", "", WRITTEN, ""]
    lines += [
        "Add these flags to Megatron's own, with the launcher or on a patched checkout. "
        "`megatron_ext.enable` takes them without dashes and without `--pp-`: `memory_cap=0.6`, "
        "`moe_pipeline_chunks=4`. All are off by default. Those marked * also work without "
        "`--pp-schedule`. Which ones exclude each other: [refused flags](refused.md).",
    ]
    for feature, (title, page) in FEATURES.items():
        (found,) = (one for one in ALL if one.__name__ == feature)
        declared = {flag.name for flag in found.flags}
        rows = []
        for flag in FLAGS:
            if flag.name in declared:
                value = flag.shown or ""
                value = f"[{value}]" if flag.const is not None else value
                name = f"`{f'{flag.name} {value}'.strip()}`{' *' if flag.alone else ''}"
                text = flag.help.replace("%%", "%")
                text += f"; at least {flag.least}" if flag.least is not None else ""
                text += f"; needs {flag.needs.text}" if flag.needs is not None else ""
                if flag.not_in_library:
                    given = flag.not_in_library_as
                    value = "" if given is None else f" as `{given[0]}`"
                    text += f" (not in `enable`{value}: {flag.not_in_library})"
                rows.append((name, text))
        lines += ["", f"## {title}", "", f"See [{Path(page.split('#')[0]).stem}]({page}).", ""]
        lines += table(("flag", "meaning"), rows)
    lines += ["", "## Options of the launcher", ""]
    lines += [
        "They come before the script: `python -m megatron_ext.launch OPTIONS SCRIPT ARGS`.",
        "",
    ]
    lines += table(("option", "meaning"), options(launch._parser()._actions))
    lines += ["", "## Environment variables", ""]
    lines += table(("variable", "meaning"), ((f"`{n}`", text) for n, text in ENVIRONMENT.items()))
    return "\n".join(lines) + "\n"


def refused() -> str:
    """The page of options that a feature does not support."""
    from megatron_ext.integration import layout
    from megatron_ext.integration.features import FEATURES as ALL
    from megatron_ext.integration.install import RULES as OF_COMMAND_LINES
    from megatron_ext.integration.library import RULES as OF_LIBRARIES

    lines = ["# Refused flags", "", WRITTEN, ""]
    lines += [
        "Each of these combinations ends the run before training, with the reason and the way out. "
        "A flag without a value is refused with every one but those that turn it off, or that the "
        "reason names.",
    ]
    for feature in ALL:
        if feature.conflicts or feature.rules:
            title, page = REFUSING[feature.__name__]
            lines += ["", f"## {title}", "", f"See [{Path(page.split('#')[0]).stem}]({page})."]
        if feature.conflicts:
            lines += ["", *table(*_refusals(feature.conflicts))]
        if feature.rules:
            lines += ["", *(f"- {rule.text}" for rule in feature.rules)]
    lines += ["", "## Layers of stages", "", *(f"- {rule.text}" for rule in layout.RULES)]
    entry = (*OF_COMMAND_LINES, *OF_LIBRARIES)
    lines += ["", "## Entry points", "", *(f"- {rule.text}" for rule in entry)]
    return "\n".join(lines) + "\n"


def _refusals(rules: Sequence[Conflict]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of a table; no column of what a refusal is limited to, if none is."""
    parts = any(rule.only for rule in rules)
    head = (
        ("flag", "only with", "why, and what to do") if parts else ("flag", "why, and what to do")
    )
    rows = []
    for rule in rules:
        flag = f"`{' '.join((rule.flag, *rule.values))}`"
        flag += f" beside `{rule.beside}`" if rule.beside else ""
        rows.append((flag, rule.only, rule.reason) if parts else (flag, rule.reason))
    return head, rows


def first_sentence(text: str | None) -> str:
    """A docstring's, in Markdown."""
    head = " ".join((text or "").split("\n\n")[0].split()).replace("``", "`")
    return head if head.endswith(".") else f"{head}."


def api() -> str:
    """The page of public names."""
    lines = ["# The Python interface", "", WRITTEN, ""]
    lines += [
        "These names are public: they change only with a line in the changelog. Everything else "
        "may change in any release. `make docs` writes pages of all docstrings, with signatures, "
        "to `build/api` ([contributing](../../CONTRIBUTING.md#docs-and-scripts)).",
    ]
    for name in ("megatron_ext", "megatron_ext.schedule"):
        module = importlib.import_module(name)
        lines += ["", f"## {name}", "", first_sentence(module.__doc__), ""]
        lines += table(
            ("name", "what it is"), ((f"`{n}`", about(module, n)) for n in module.__all__)
        )
    for name in MODULES:
        package = importlib.import_module(name)
        lines += ["", f"## {name}", "", f"{first_sentence(package.__doc__)} Modules:", ""]
        lines += table(("module", "what it is"), modules(package.__path__[0]))
    return "\n".join(lines) + "\n"


def about(module: object, name: str) -> str:
    """One line on a public name."""
    found = getattr(module, name)
    if inspect.isclass(found) or inspect.isfunction(found):
        return first_sentence(found.__doc__)
    return CONSTANTS[name]


def modules(folder: str) -> Iterator[tuple[str, str]]:
    """The modules of a package without importing them, since some need torch."""
    for module in pkgutil.iter_modules([folder]):
        tree = ast.parse((Path(folder) / f"{module.name}.py").read_text(encoding="utf-8"))
        yield f"`{module.name}`", first_sentence(ast.get_docstring(tree))


PAGES: dict[str, Callable[[], str]] = {"flags": flags, "refused": refused, "cli": cli, "api": api}


def main(argv: list[str] | None = None) -> None:
    """Write the pages named in ``argv``; all of them without names."""
    parser = argparse.ArgumentParser(description="Write the reference pages.")
    parser.add_argument("pages", nargs="*", choices=[*PAGES, []], metavar="PAGE")
    for name in parser.parse_args(argv).pages or PAGES:
        path = FOLDER / f"{name}.md"
        path.write_text(PAGES[name](), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
