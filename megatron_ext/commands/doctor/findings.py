"""Findings of ``doctor``: what is good, what is not, and how to fix it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__, patching
from ...offload.host_memory import GIB, stated_host_bytes
from ...releases import PYTHON, TAGS
from . import machine

OK, WARNING, ERROR = "ok", "warning", "error"
_INSTALL = "pip install 'megatron-ext[megatron]', or use an image that has torch and Megatron"
_CPU = "or train with `megatron_ext.launch --device cpu`"


@dataclass(frozen=True)
class Finding:
    """One line: ``level`` is ok, warning or error, and only ok needs no ``fix``."""

    name: str
    level: str
    text: str
    fix: str = ""


def diagnose(facts: dict[str, Any], checkout: Path | None, root: Path) -> Iterator[Finding]:
    """All findings, in the order in which they are shown.

    Args:
        facts: of ``probe``.
        checkout: the Megatron-LM folder meant, if any.
        root: the file system's, for tests.
    """
    yield from _own()
    if "error" in facts:
        fix = f"run {Path(__file__).with_name('probe.py')} by hand to see why"
        yield Finding("torch", ERROR, f"could not be looked at: {facts['error']}", fix)
        facts = {"torch": {"error": ""}}
    else:
        yield from _torch(facts["torch"])
    yield from _checkout(checkout)
    if "error" not in facts["torch"]:
        yield from _megatron(facts["megatron"], checkout)
        yield from _libraries(facts["libraries"])
    yield from _hardware(root, facts["torch"])
    yield from _environment()


def _own() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info >= PYTHON:
        yield Finding("python", OK, version)
    else:
        fix = f"use Python {'.'.join(map(str, PYTHON))} to train"
        yield Finding("python", WARNING, f"{version}: enough for the schedule tools only", fix)
    yield Finding("megatron_ext", OK, f"{__version__}, patches for {', '.join(TAGS)}")


def _torch(torch: dict[str, Any]) -> Iterator[Finding]:
    if "error" in torch:
        text = "cannot be imported, so only the schedule tools work, not training"
        yield Finding("torch", ERROR, f"{text} ({torch['error']})", _INSTALL)
        return
    yield Finding("torch", OK, f"{torch['version']}")
    devices = torch["devices"]
    if devices:
        names = sorted({f"{d['name']} (compute capability {d['capability']})" for d in devices})
        text = f"{torch['cuda']}, {len(devices)} x {', '.join(names)}"
        yield Finding("cuda", OK, text)
    elif torch["cuda"] is None:
        fix = f"install a CUDA build of torch, {_CPU}"
        yield Finding("cuda", WARNING, "this torch is built without CUDA", fix)
    else:
        fix = f"run on a machine with a GPU, {_CPU}"
        yield Finding("cuda", WARNING, f"{torch['cuda']}, but no device", fix)
    version, why = machine.driver()
    if version is not None:
        yield Finding("driver", OK, version)
    elif devices:
        yield Finding("driver", WARNING, f"unknown: {why}", "put nvidia-smi on PATH")
    elif torch["cuda"] is not None:
        # Without a device one warning is enough.
        yield Finding("driver", OK, f"none: {why}")
    if "nccl" in torch:
        yield Finding("nccl", OK, torch["nccl"])
    else:
        fix = "without it, ranks communicate through gloo on CPUs"
        yield Finding("nccl", WARNING, "this torch has none", fix)


def _checkout(checkout: Path | None) -> Iterator[Finding]:
    if checkout is None:
        return
    try:
        found = patching.status(checkout)
    except patching.PatchError as error:
        yield Finding("checkout", ERROR, str(error), "scripts/get_megatron.sh fetches one")
        return
    where = f"{checkout}: Megatron {found.version}"
    if not (checkout / "pretrain_gpt.py").is_file():
        fix = "fetch it again with scripts/get_megatron.sh"
        yield Finding("checkout", ERROR, f"{where}, without pretrain_gpt.py", fix)
    else:
        yield Finding("checkout", OK, where)
    tag = found.tag or "the lines"
    if found.problem:
        fix = "restore the file to patch it; the launcher needs no patch"
        yield Finding("patches", WARNING, f"{tag} do not fit: {found.problem}", fix)
    elif found.state == patching.NOT_APPLIED:
        yield Finding("patches", OK, f"{tag} fit, not applied; the launcher needs none")
    elif found.state == patching.APPLIED:
        yield Finding("patches", OK, f"{tag} applied: our flags work with its own scripts")
    else:
        fix = "run `megatron-ext patch apply` on it"
        yield Finding("patches", WARNING, f"{tag} {found.state}", fix)


def _megatron(found: dict[str, Any], checkout: Path | None) -> Iterator[Finding]:
    if "error" in found:
        text = f"megatron.core cannot be imported ({found['error']})"
        yield Finding("megatron", ERROR, text, f"give --megatron CHECKOUT; or {_INSTALL}")
        return
    where = f"{found['version']}, in {found['path']}"
    if "unsupported" in found:
        yield Finding("megatron", ERROR, found["unsupported"], "use one of the supported releases")
        return
    if checkout is not None and Path(found["path"]) != checkout.resolve():
        fix = f"see why {checkout} has no megatron.core; fetch it again"
        yield Finding("megatron", ERROR, f"{where}, not the checkout", fix)
    elif found.get("untested"):
        text, _, advice = found["untested"].partition(". ")
        yield Finding("megatron", WARNING, f"{text}, in {found['path']}", advice)
    else:
        yield Finding("megatron", OK, where)
    if "training_error" in found:
        fix = "install what it names (six, pyyaml, regex, einops, …), or repair the checkout"
        text = f"megatron.training cannot be imported ({found['training_error']})"
        yield Finding("training", ERROR, text, fix)
    reported: set[str] = set()
    for group, hooks in found.get("hooks", {}).items():
        missing, total = hooks["missing"], hooks["total"]
        if not missing:
            yield Finding("hooks", OK, f"{group}: {total} of {total} found")
            continue
        count = f"{total - len(missing)} of {total} found" if total else "not found"
        what = "the same is missing" if set(missing) <= reported else "; ".join(missing)
        reported |= set(missing)
        fix = "use an unmodified release; if it is one, report this"
        yield Finding("hooks", ERROR, f"{group}: {count}; {what}", fix)


def _libraries(found: dict[str, Any]) -> Iterator[Finding]:
    engine, apex = found.get("transformer_engine", {}), found.get("apex", {})
    version = engine.get("version")
    if version is None:
        fix = "install it, or train with --transformer-impl local, whose layers split too"
        text, level = engine.get("error", "not installed"), WARNING
    elif tuple(int(x) for x in version.split(".")[:2] if x.isdigit()) >= (2, 3):
        text, level, fix = f"{version}: its linear modules split into B and W", OK, ""
    else:
        fix = "use 2.3 or later for zb-*, v-* and interleaved-zb to pay off"
        text, level = f"{version}: its linear modules run B and W as one", WARNING
    yield Finding("transformer engine", level, text, fix)
    missing = apex.get("error", "not installed")
    if found.get("fused_wgrad"):
        text = f"{apex.get('version', 'kernels only')}: weight gradients are added up in one kernel"
        yield Finding("apex", OK, text)
    elif version is not None:
        yield Finding("apex", OK, f"{missing}; Transformer Engine does")
    else:
        fix = "install it with its kernels, or give --no-gradient-accumulation-fusion"
        yield Finding("apex", WARNING, missing, fix)


def _hardware(root: Path, torch: dict[str, Any]) -> Iterator[Finding]:
    gpus, nodes = machine.gpus(root), machine.numa_nodes(root)
    yield from _numa(gpus, nodes)
    if gpus:
        links = sorted({gpu.link for gpu in gpus})
        shared = [g.bus for g in gpus if sum(g.root == other.root for other in gpus) > 1]
        text = f"{len(gpus)} GPUs at {', '.join(links)}"
        if shared:
            # Not a fault: offload plans for it, by its flag or from measured rates.
            text += f"; {len(shared)} share a root port, for --pp-offload-transfer paired"
        yield Finding("pcie", OK, text)
    available = stated_host_bytes(root)
    if available is None:
        fix = "check by hand that offload's host memory fits"
        text = "the operating system does not report how much is free"
        yield Finding("host memory", WARNING, text, fix)
        return
    ranks = max(1, len(torch.get("devices", [])) or len(gpus))
    each = 0.9 * available / ranks / GIB
    text = f"{available / GIB:.1f} GiB free, so {each:.1f} GiB a rank to pin"
    if gpus and each < 8:
        fix = "offload fewer chunks (--pp-offload-chunks), or give the job more memory (--mem=0)"
        yield Finding("host memory", WARNING, text, fix)
    else:
        yield Finding("host memory", OK, text)


def _numa(gpus: list[machine.Gpu], nodes: list[int]) -> Iterator[Finding]:
    usable, total = machine.cpus_bound()
    cpus = f"{total} CPUs" if usable == total else f"{usable} of {total} CPUs for this process"
    text = f"{len(nodes) or 'unknown'} node(s), {cpus}"
    if len(nodes) > 1 and gpus:
        places = [g.node for g in gpus]
        if None in places:
            fix = "use a machine (or a VM) that reports it, and bind ranks by hand"
            text += "; the nodes of the GPUs are unknown"
            yield Finding("numa", WARNING, text, fix)
            return
        text += "; GPUs on " + ", ".join(f"node {n}: {places.count(n)}" for n in nodes)
    yield Finding("numa", OK, text)


def _environment() -> Iterator[Finding]:
    bad = machine.conflicts(os.environ)
    for name, effect, fix in bad:
        yield Finding("environment", WARNING, f"{name}: {effect}", fix)
    if not bad:
        yield Finding("environment", OK, "no conflicting variables")
