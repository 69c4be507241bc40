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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

# One run for each group of hooks: name -> (schedule, its offload, further arguments).
_RUNS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "schedules (1f1b, zb-h1, …)": ("zb-h1", None, {}),
    "V placement": ("v-half", None, {}),
    "PipeOffload": ("v-half", "auto", {}),
    "cheap recompute": ("v-half", "auto", {"pp_cheap_recompute": True}),
    "CUDA graphs": ("1f1b", None, {"cuda_graph_impl": "transformer_engine"}),
    "slices": ("zb-h1", None, {"pp_slices": 2, "transformer_impl": "local"}),
    "sharded vocabulary": ("zb-h1", None, {"pp_vocab_parallel": True}),
    "passes in pairs": ("1f1b", None, {"overlap_moe_expert_parallel_comm": True}),
}


def torch_facts() -> dict[str, Any]:
    """Versions and devices; ``{"error": ...}`` without torch."""
    try:
        import torch
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    facts["devices"] = []
    with contextlib.suppress(Exception):
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            found = torch.cuda.get_device_properties(index)
            capability = f"{found.major}.{found.minor}"
            facts["devices"].append({"name": found.name, "capability": capability})
    with contextlib.suppress(Exception):
        if torch.version.cuda is not None and torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return facts


def megatron_facts() -> dict[str, Any]:
    """Version, place and what of it our hooks find; ``{"error": ...}`` without Megatron."""
    try:
        from megatron.core import package_info
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {"version": str(package_info.__version__)}
    facts["path"] = str(Path(package_info.__file__).resolve().parents[2])
    from megatron_ext.integration import ConfigError
    from megatron_ext.integration.versions import untested

    try:
        facts["untested"] = untested(facts["version"])
    except ConfigError as error:
        return {**facts, "unsupported": str(error)}
    try:
        import megatron.training.training  # noqa: F401
    except Exception as error:
        return {**facts, "training_error": f"{type(error).__name__}: {error}", "hooks": {}}
    facts["hooks"] = hooks(facts["version"])
    return facts


class Recorder:
    """Stands for ``Hooks``: what would be bound is looked for and noted.

    Attributes:
        found: by target, what is wrong with it; None: it fits.
        error: what ended the looking; None: nothing.
    """

    def __init__(self, version: str) -> None:
        from megatron_ext.integration.hooks import Hooks

        self.version, self.hooks = version, Hooks(version)
        self.found: dict[Any, str | None] = {}
        self.error: str | None = None

    def apply(self, hooks: Sequence[Any]) -> None:
        for hook in hooks:
            try:
                self.look(hook)
                self.found[hook.target] = None
            except Exception as error:
                self.found[hook.target] = str(error)

    def look(self, hook: Any) -> None:
        """Raise an exception if a hook does not fit."""
        self.hooks.find(hook)

    def report(self) -> str:
        return ""


R = TypeVar("R", bound=Recorder)


class _Arguments(SimpleNamespace):
    """Megatron's arguments where only a few matter: every other one is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def hooks(version: str) -> dict[str, Any]:
    """Group -> ``{"total": n, "missing": [sentences]}``, as an installation would bind them."""
    result = {}
    for group, seen in looked(lambda: Recorder(version)):
        missing = [error for error in seen.found.values() if error is not None]
        result[group] = {"total": len(seen.found), "missing": missing}
        if seen.error is not None:
            result[group] = {"total": 0, "missing": [seen.error]}
    return result


def looked(make: Callable[[], R]) -> Iterator[tuple[str, R]]:
    """Every group of hooks, and a recorder of ``make`` that has seen it."""
    from megatron_ext.integration import Installation

    for group, hook in _groups().items():
        installation, seen = Installation(), make()
        installation.hooks = seen  # type: ignore[assignment]
        try:
            hook(installation)
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
        yield group, seen


def _groups() -> dict[str, Callable[[Any], None]]:
    from megatron_ext.integration.feature import Run
    from megatron_ext.integration.features.schedule.choose import ScheduleRequest
    from megatron_ext.integration.offload_request import OffloadRequest

    def start(installation: Any, arguments: Any, choice: Any) -> None:
        training = "megatron.training" in sys.modules
        version = installation.hooks.version
        installation.start(Run(arguments, version, training, schedule=choice, chunks=2))

    def schedule(name: str, offload: str | None, flags: dict[str, Any]) -> Callable[[Any], None]:
        def hook(installation: Any) -> None:
            asked = None if offload is None else OffloadRequest(offload)
            arguments = _Arguments(
                rank=1,
                pp_schedule=name,
                pipeline_model_parallel_size=2,
                distributed_timeout_minutes=10,
                dataloader_inter_document_masking=True,
                iterations_to_skip=[1],
                **flags,
            )
            request = ScheduleRequest.of(name, offloading=asked)
            start(installation, arguments, request.resolve(2, None, 2))

        return hook

    groups: dict[str, Callable[[Any], None]] = {"flags": lambda i: i.open()}
    groups |= {name: schedule(*run) for name, run in _RUNS.items()}
    moe = _Arguments(rank=1, moe_pipeline_chunks="2", moe_memory_reuse="s4")
    groups["MPipeMoE"] = lambda i: start(i, moe, None)
    return groups


def library_facts() -> dict[str, Any]:
    """Versions of Transformer Engine and Apex; absent where they cannot be imported."""
    facts: dict[str, Any] = {}
    for name in ("transformer_engine", "apex"):
        try:
            module = importlib.import_module(name)
            if name == "transformer_engine":
                importlib.import_module("transformer_engine.pytorch")
            facts[name] = {"version": str(getattr(module, "__version__", "of unknown version"))}
        except ImportError as error:
            if getattr(error, "name", None) != name:
                facts[name] = {"error": str(error)}
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(Exception):
        importlib.import_module("fused_weight_gradient_mlp_cuda")
        facts["fused_wgrad"] = True
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
