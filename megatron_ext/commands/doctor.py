"""``doctor``: what of this machine, its torch and its Megatron works with us, and what to change.

Runs on a bare interpreter. torch and Megatron are looked at by ``megatron_ext/probe.py``, in a
process of its own, so that nothing which they do can end this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__, patching
from ..offload.host_memory import GIB, stated_host_bytes
from ..releases import NEWEST, RELEASES, TAGS
from . import machine
from .common import InputError, Parser

OK, WARNING, ERROR = "ok", "warning", "error"
PROBE = Path(__file__).resolve().parent.parent / "probe.py"
PROBE_SECONDS = 180
_INSTALL = "pip install 'megatron-ext[megatron]', or use an image that has torch and Megatron"


@dataclass(frozen=True)
class Finding:
    """One line: ``level`` is ok, warning or error, and only ok needs no ``fix``."""

    name: str
    level: str
    text: str
    fix: str = ""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="what of this machine, torch and Megatron works, and how to mend the rest",
        description="One line a subject: ok, warning or error, with the fix. Exit status 1 if one "
        "is an error.",
    )
    parser.add_argument(
        "--megatron",
        metavar="CHECKOUT",
        type=Path,
        help="a Megatron-LM folder to look at; default: $MEGATRON_LM, else what Python finds",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    checkout: Path | None = args.megatron
    if checkout is not None and not checkout.is_dir():
        raise InputError(f"--megatron {checkout} is no folder; give a Megatron-LM checkout")
    named = os.environ.get("MEGATRON_LM")
    if checkout is None and named:
        checkout = Path(named)
    facts = probe(checkout)
    findings = list(diagnose(facts, checkout, Path("/")))
    worst = next(level for level in (ERROR, WARNING, OK) if any(f.level == level for f in findings))
    if args.json:
        print(json.dumps({"status": worst, "lines": [asdict(f) for f in findings]}))
    else:
        print("\n".join(table(findings)))
    return 1 if worst == ERROR else 0


def table(findings: list[Finding]) -> list[str]:
    """The findings as text; a fix stands below its line."""
    names, levels = (max(len(x) for x in column) for column in zip(*_heads(findings)))
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<{levels}}  {finding.name:<{names}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':<{levels}}  {'':<{names}}  -> {finding.fix}")
    return lines


def _heads(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.level) for finding in findings]


def probe(checkout: Path | None) -> dict[str, Any]:
    """What ``megatron_ext/probe.py`` finds out; ``{"error": ...}`` if it comes to no end."""
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-W", "ignore", str(PROBE)]
    if checkout is not None:
        command.append(str(checkout))
    # What Megatron compiles or captures for a GPU is not needed, and costs time.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"status {done.returncode}: {last}"}
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def diagnose(facts: dict[str, Any], checkout: Path | None, root: Path) -> Iterator[Finding]:
    """All findings, in the order in which they are shown.

    Args:
        facts: of ``probe``.
        checkout: the Megatron-LM folder meant, if any.
        root: the file system's, for tests.
    """
    yield from _own()
    if "error" in facts:
        fix = f"run {PROBE} by hand to see why"
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
    running = ", ".join(r.tag for r in RELEASES if r.python <= sys.version_info[:2])
    if sys.version_info >= NEWEST.python:
        yield Finding("python", OK, version)
    else:
        yield Finding(
            "python",
            WARNING,
            f"{version}: enough for the schedule tools and {running or 'no Megatron'} only",
            f"use Python {'.'.join(map(str, NEWEST.python))} for {NEWEST.tag}",
        )
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
        fix = "install a CUDA build of torch, or train with `megatron_ext.launch --device cpu`"
        yield Finding("cuda", WARNING, "this torch is built without CUDA", fix)
    else:
        fix = "run on a machine with a GPU, or train with `megatron_ext.launch --device cpu`"
        yield Finding("cuda", WARNING, f"{torch['cuda']}, but no device", fix)
    version, why = machine.driver()
    if version is not None:
        yield Finding("driver", OK, version)
    elif devices:
        yield Finding("driver", WARNING, f"unknown: {why}", "put nvidia-smi on PATH")
    else:
        yield Finding("driver", WARNING, f"none: {why}", "install NVIDIA's driver to use a GPU")
    if "nccl" in torch:
        yield Finding("nccl", OK, torch["nccl"])
    else:
        yield Finding(
            "nccl", WARNING, "this torch has none", "without it, ranks talk through gloo on CPUs"
        )


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
        fix = "fetch it anew with scripts/get_megatron.sh"
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
        fix = f"give --megatron CHECKOUT; or {_INSTALL}"
        yield Finding("megatron", ERROR, text, fix)
        return
    where = f"{found['version']}, in {found['path']}"
    if "unsupported" in found:
        yield Finding("megatron", ERROR, found["unsupported"], "use one of the supported releases")
        return
    if checkout is not None and Path(found["path"]) != checkout.resolve():
        fix = f"see why {checkout} has no megatron.core; fetch it anew"
        yield Finding("megatron", ERROR, f"{where}, not the checkout", fix)
    else:
        yield Finding("megatron", OK, where)
    if "training_error" in found:
        fix = "install what it names (six, pyyaml, regex, einops, …), or repair the checkout"
        text = f"megatron.training cannot be imported ({found['training_error']})"
        yield Finding("training", ERROR, text, fix)
    said: set[str] = set()
    for group, hooks in found.get("hooks", {}).items():
        missing, total = hooks["missing"], hooks["total"]
        name = "hooks"
        if not missing:
            yield Finding(name, OK, f"{group}: {total} of {total} found")
        else:
            count = f"{total - len(missing)} of {total} found" if total else "not found"
            fix = "use an unmodified release; if it is one, report this"
            what = "the same is missing" if set(missing) <= said else "; ".join(missing)
            said |= set(missing)
            yield Finding(name, ERROR, f"{group}: {count}; {what}", fix)


def _libraries(found: dict[str, Any]) -> Iterator[Finding]:
    engine = found.get("transformer_engine", {})
    if "version" in engine:
        numbers = tuple(int(x) for x in engine["version"].split(".")[:2] if x.isdigit())
        if numbers >= (2, 3):
            text = f"{engine['version']}: its linear modules split into B and W"
            yield Finding("transformer engine", OK, text)
        else:
            text = f"{engine['version']}: its linear modules run B and W as one"
            fix = "use 2.3 or later for zb-*, v-* and interleaved-zb to pay off"
            yield Finding("transformer engine", WARNING, text, fix)
    else:
        reason = engine.get("error", "not installed")
        fix = "install it, or train with --transformer-impl local, whose layers split too"
        yield Finding("transformer engine", WARNING, reason, fix)
    apex = found.get("apex", {})
    if found.get("fused_wgrad"):
        text = f"{apex.get('version', 'kernels only')}: weight gradients are added up in one kernel"
        yield Finding("apex", OK, text)
    elif "version" in engine:
        yield Finding("apex", OK, f"{apex.get('error', 'not installed')}; Transformer Engine does")
    else:
        fix = "install it with its kernels, or give --no-gradient-accumulation-fusion"
        yield Finding("apex", WARNING, apex.get("error", "not installed"), fix)


def _hardware(root: Path, torch: dict[str, Any]) -> Iterator[Finding]:
    gpus, nodes = machine.gpus(root), machine.numa_nodes(root)
    yield from _numa(gpus, nodes)
    if gpus:
        links = sorted({gpu.link for gpu in gpus})
        shared = [g.bus for g in gpus if sum(g.root == other.root for other in gpus) > 1]
        text = f"{len(gpus)} GPUs at {', '.join(links)}"
        if shared:
            # Not a fault: offload plans for it, if it is told to or measures it.
            text += f"; {len(shared)} share a root port, for --pp-offload-transfer paired"
        yield Finding("pcie", OK, text)
    available = stated_host_bytes(root)
    if available is None:
        fix = "check by hand that offload's host memory fits"
        yield Finding("host memory", WARNING, "this machine does not say how much is free", fix)
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
            fix = "ask for a machine (or a VM) that says so, and bind ranks by hand"
            text += "; which node a GPU is on is unknown"
            yield Finding("numa", WARNING, text, fix)
            return
        text += "; GPUs on " + ", ".join(f"node {n}: {places.count(n)}" for n in nodes)
    yield Finding("numa", OK, text)


def _environment() -> Iterator[Finding]:
    bad = machine.conflicts(os.environ)
    for name, effect, fix in bad:
        yield Finding("environment", WARNING, f"{name}: {effect}", fix)
    if not bad:
        yield Finding("environment", OK, "nothing that works against a schedule")
