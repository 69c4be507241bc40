"""Facts about this interpreter's torch and Megatron, as JSON: ``doctor`` runs this file alone.

In a process of its own because importing torch or Megatron may fail in any way, a crash included,
and takes seconds. Nothing is hooked: hooks are looked for and not bound. Without a GPU, Megatron is
imported as ``launch --device cpu`` does it.

    python megatron_ext/commands/doctor/probe.py [CHECKOUT]
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Schedule, its offload, and further arguments of one run for each group of hooks.
_RUNS: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("zb-h1", None, {}),
    ("v-half", "auto", {"pp_cheap_recompute": True}),
    ("zb-h1", None, {"pp_slices": 2, "transformer_impl": "local"}),
    ("zb-h1", None, {"pp_vocab_parallel": True}),
    ("1f1b", None, {"overlap_moe_expert_parallel_comm": True}),
)


def torch_facts() -> dict[str, Any]:
    """Versions and devices; ``{"error": ...}`` without torch."""
    try:
        import torch
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    devices = []
    with contextlib.suppress(Exception):
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            found = torch.cuda.get_device_properties(index)
            devices.append(f"{found.name} (compute capability {found.major}.{found.minor})")
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def megatron_facts() -> dict[str, Any]:
    """Version, place and what of it our hooks find; ``{"error": ...}`` without Megatron."""
    try:
        from megatron.core import package_info
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {"version": str(package_info.__version__)}
    facts["path"] = str(Path(package_info.__file__).resolve().parents[2])
    from megatron_ext.integration import ConfigError, Installation
    from megatron_ext.integration.versions import untested

    try:
        facts["untested"] = untested(facts["version"])
    except ConfigError as error:
        return {**facts, "unsupported": str(error)}
    try:
        import megatron.training.training  # noqa: F401
    except Exception as error:
        return {**facts, "training_error": f"{type(error).__name__}: {error}"}
    found: set[Any] = set()
    missing: dict[str, None] = {}
    for hook in _groups():
        seen = _Recorder(facts["version"])
        installation = Installation()
        installation.hooks = seen  # type: ignore[assignment]
        try:
            hook(installation)
        except Exception as error:
            missing[f"{type(error).__name__}: {error}"] = None
        found |= seen.found
        missing |= dict.fromkeys(seen.missing)
    return {**facts, "hooks": len(found), "missing": list(missing)}


class _Recorder:
    """Stands for ``Hooks``: what would be bound is looked for and noted."""

    def __init__(self, version: str) -> None:
        from megatron_ext.integration.hooks import Hooks

        self.version, self.hooks = version, Hooks(version)
        self.found: set[Any] = set()
        self.missing: list[str] = []

    def apply(self, hooks: Sequence[Any]) -> None:
        for hook in hooks:
            try:
                self.hooks.find(hook)
                self.found.add(hook.target)
            except Exception as error:
                self.missing.append(str(error))

    def report(self) -> str:
        return ""


class _Arguments(SimpleNamespace):
    """Megatron's arguments where only a few matter: every other one is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _groups() -> list[Callable[[Any], None]]:
    """Functions that install every feature in turn."""
    from megatron_ext.integration.feature import Run
    from megatron_ext.integration.features.schedule.choose import ScheduleRequest

    def start(installation: Any, arguments: Any, choice: Any) -> None:
        training = "megatron.training" in sys.modules
        version = installation.hooks.version
        installation.start(Run(arguments, version, training, schedule=choice, chunks=2))

    def schedule(name: str, offload: str | None, flags: dict[str, Any]) -> Callable[[Any], None]:
        def hook(installation: Any) -> None:
            arguments = _Arguments(
                rank=1,
                pp_schedule=name,
                pipeline_model_parallel_size=2,
                distributed_timeout_minutes=10,
                dataloader_inter_document_masking=True,
                **flags,
            )
            request = ScheduleRequest.of(name, offloading=offload)
            start(installation, arguments, request.resolve(2, None, 2))

        return hook

    moe = _Arguments(rank=1, moe_pipeline_chunks="2", moe_memory_reuse="s4")
    runs = [schedule(*run) for run in _RUNS]
    return [lambda i: i.open(), *runs, lambda i: start(i, moe, None)]


def library_facts() -> dict[str, str]:
    """Versions of Transformer Engine and Apex, or why they cannot be imported."""
    facts = {}
    for name, part in (("transformer_engine", ".pytorch"), ("apex", "")):
        try:
            importlib.import_module(name + part)
            facts[name] = str(getattr(sys.modules[name], "__version__", "of unknown version"))
        except Exception as error:
            absent = getattr(error, "name", "") == name
            facts[name] = "not installed" if absent else f"{type(error).__name__}: {error}"
    return facts


def main() -> None:
    """Print everything as one JSON object, the last line of standard output."""
    root = str(Path(__file__).resolve().parents[3])
    # Python has put this file's folder first, whose modules are no top-level ones.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
    sys.path[:0] = [*(os.path.abspath(p) for p in sys.argv[1:]), root]
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        facts: dict[str, Any] = {"torch": torch_facts()}
        if "error" not in facts["torch"]:
            # Before anything replaces functions of torch.
            facts["libraries"] = library_facts()
            if not facts["torch"]["devices"]:
                from megatron_ext import cpu

                cpu.install()
            facts["megatron"] = megatron_facts()
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
