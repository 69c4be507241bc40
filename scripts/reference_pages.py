"""Writes the reference pages that code knows best: ``python -m scripts.reference_pages``.

It needs torch. Tests compare the pages with what this makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

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
    "VocabularyParallel": ("A sharded vocabulary", "../guides/vocabulary.md"),
    "MoE": ("MoE layers in chunks", "../guides/moe.md"),
    "Telemetry": ("Traces", "../guides/tracing.md"),
}
ENVIRONMENT = {
    "MEGATRON_EXT_VERBOSE": "1: the log names every function that is replaced, and all details",
    "MEGATRON_EXT_TRACE": "1: every action is printed when it starts, for a run that hangs",
    "MEGATRON_EXT_WATCHDOG_SECONDS": "a rank without progress for this time reports and exits "
    "with status 75; default: `--distributed-timeout-minutes`, in a "
    "library the time limit of the process groups",
    "MEGATRON_EXT_EFFORT": "seconds of search for an order; default 1",
    "MEGATRON_EXT_OFFLOAD_MIN_BYTES": "smaller tensors are never offloaded; default 65536, "
    "4096 in experts",
    "MEGATRON_EXT_DOCTOR_SECONDS": "time limit of each probe of `megatron-ext doctor`",
    "MEGATRON_EXT_CPU_CAPABILITY": "with `--device cpu`: the compute capability that scripts see, "
    "such as 9.0",
    "MEGATRON_LM": "the checkout that the launcher's word `pretrain_gpt` and `doctor` use",
}
INTERNAL = {"MEGATRON_EXT_STARTED", "MEGATRON_EXT_"}


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
        "`--pp-schedule`.",
    ]
    for feature, (title, page) in FEATURES.items():
        (found,) = (one for one in ALL if one.__name__ == feature)
        declared = {flag.name for flag in found.flags}
        rows = []
        for flag in FLAGS:
            if flag.name in declared:
                value = flag.shown or ""
                name = f"`{f'{flag.name} {value}'.strip()}`{' *' if flag.alone else ''}"
                text = flag.help.replace("%%", "%")
                text += f"; at least {flag.least}" if flag.least is not None else ""
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


def denied() -> str:
    """The page of denials."""
    from megatron_ext.integration.support import DENIALS

    lines = ["# Denied", "", WRITTEN, ""]
    lines += [
        "These combinations would train wrong numbers without a word, so a run ends with the "
        "sentence, before its first step where flags say so. Whatever else does not work ends "
        "with an error of Megatron's, PyTorch's or our own. Anything else that the tests have not "
        "run is named in one line of the log: `not tested together: A, B`.",
        "",
    ]
    rows = ((one.feature, one.beside, one.sentence) for one in DENIALS)
    return "\n".join([*lines, *table(("feature", "beside", "sentence"), rows)]) + "\n"


def main() -> None:
    """Write the pages."""
    for name, text in (("flags.md", flags()), ("denied.md", denied())):
        (FOLDER / name).write_text(text, encoding="utf-8")
        print((FOLDER / name).relative_to(ROOT))


if __name__ == "__main__":
    main()
