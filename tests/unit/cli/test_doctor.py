"""``doctor`` where nothing is installed, and what it makes of hardware that this machine lacks.

On a checkout: tests/checkout/test_doctor.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.commands import doctor
from megatron_ext.commands.doctor import findings, machine
from megatron_ext.offload.host_memory import stated_host_bytes
from tests.support import ROOT
from tests.support.doctor import errors, run, without_gpu


@without_gpu
def test_without_torch_and_megatron() -> None:
    done = run(bare=True)
    assert (done.returncode, errors(done)) == (1, [])


def test_json_and_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    done = run("--json", "--megatron", str(tmp_path), bare=True)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["status"] == "error"
    lines = {line["name"]: line for line in data["lines"]}
    assert lines["checkout"]["level"] == "error" and lines["checkout"]["fix"]
    assert lines["megatron_ext"]["level"] == "ok"
    assert all(line["fix"] for line in data["lines"] if line["level"] != "ok")


def test_no_such_folder() -> None:
    done = run("--megatron", "/no/such/folder", bare=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "is no folder" in done.stderr


@pytest.mark.parametrize("what", ["sys.exit(3)", "os.abort()", "print('no json'); sys.exit(1)"])
def test_survives_whatever_the_probe_does(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    """torch may end the process that imports it."""
    (tmp_path / "probe.py").write_text(f"import os, sys\n{what}\n")
    monkeypatch.setattr(doctor, "PROBE", tmp_path / "probe.py")
    findings = list(doctor.diagnose(doctor.run_probe(None), None, Path("/")))
    assert [f.level for f in findings if f.name == "torch"] == ["error"]
    assert any(f.name == "host memory" for f in findings)


def _server(root: Path, nodes: tuple[str, str] = ("0", "1"), free_kib: int = 1 << 30) -> None:
    """A machine with four GPUs, two on each of two NUMA nodes, two behind one root port."""
    for index in range(4):
        port = f"0000:{index // 2}a:01.0" if index < 2 else f"0000:{index}a:01.0"
        real = root / f"sys/devices/pci0000:{index}0/{port}/0000:{index}b:00.0"
        real.mkdir(parents=True)
        values = {"vendor": "0x10de", "class": "0x030200", "numa_node": nodes[index // 2]}
        values |= {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}
        for name, value in values.items():
            (real / name).write_text(value + "\n")
        (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (root / f"sys/bus/pci/devices/0000:{index}b:00.0").symlink_to(real)
    for node in (0, 1):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemAvailable: {free_kib} kB\n")


def _hardware(root: Path) -> dict[str, doctor.Finding]:
    return {f.name: f for f in findings._hardware(root, {"devices": []})}


def test_a_server_with_four_gpus(tmp_path: Path) -> None:
    _server(tmp_path)
    found = _hardware(tmp_path)
    assert found["numa"].level == "ok"
    assert "2 node(s)" in found["numa"].text
    assert found["numa"].text.endswith("GPUs on node 0: 2, node 1: 2")
    assert found["pcie"].text == (
        "4 GPUs at 32.0 GT/s x16; 2 share a root port, for --pp-offload-transfer paired"
    )
    assert found["host memory"].text == "1024.0 GiB free, so 230.4 GiB a rank to pin"


def test_a_virtual_machine_that_hides_its_nodes_and_has_little_memory(tmp_path: Path) -> None:
    _server(tmp_path, nodes=("-1", "-1"), free_kib=16 << 20)
    found = _hardware(tmp_path)
    assert found["numa"].level == "warning" and "are unknown" in found["numa"].text
    assert found["host memory"].level == "warning" and "3.6 GiB a rank" in found["host memory"].text


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    _server(tmp_path)
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text(str(64 << 30))
    (group / "memory.current").write_text(str(24 << 30))
    assert stated_host_bytes(tmp_path) == 40 << 30


def test_variables_that_work_against_a_schedule() -> None:
    bad = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "0",
    }
    good = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0", "HOME": "1"}
    assert {name.split("=")[0] for name, _, _ in machine.conflicts(bad)} == set(bad)
    assert machine.conflicts(good) == []


def test_scripts_export_nothing_that_torch_warns_of() -> None:
    """Every rank of torch from 2.8 on would say that it is deprecated."""
    scripts = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts" / "slurm").glob("*.sh")]
    assert len(scripts) > 5
    named = [path.name for path in scripts if "AVOID_RECORD_STREAMS" in path.read_text()]
    assert named == []


ENGINES = {
    "2.20.2": ("ok", "split into B and W"),
    "2.1.0": ("warning", "run B and W as one"),
}


@pytest.mark.parametrize("version", ENGINES)
def test_what_transformer_engine_enables(version: str) -> None:
    found = list(findings._libraries({"transformer_engine": {"version": version}}))
    assert (found[0].level, ENGINES[version][1] in found[0].text) == (ENGINES[version][0], True)
    assert found[1].level == "ok"  # Apex is not needed then


def test_a_gpu_is_named() -> None:
    device = {"name": "NVIDIA H200", "capability": "9.0"}
    facts = {"version": "2.15.0", "cuda": "13.2", "devices": [device] * 8, "nccl": "2.30.7"}
    found = {f.name: f for f in findings._torch(facts)}
    assert found["cuda"].text == "13.2, 8 x NVIDIA H200 (compute capability 9.0)"
    assert found["nccl"] == doctor.Finding("nccl", "ok", "2.30.7")


def test_no_megatron_and_one_without_a_training_loop(tmp_path: Path) -> None:
    (found,) = findings._megatron(
        {"error": "ModuleNotFoundError: No module named 'megatron'"}, None
    )
    assert (found.name, found.level) == ("megatron", "error") and "--megatron CHECKOUT" in found.fix
    facts = {"version": "0.19.2", "path": str(tmp_path), "training_error": "no megatron.training"}
    found, training = findings._megatron(facts, tmp_path)
    assert (found.level, training.level) == ("ok", "error")


def test_a_megatron_newer_than_tested(tmp_path: Path) -> None:
    """A warning with advice, and still all hooks looked up."""
    facts: dict[str, Any] = {
        "version": "99.1.0",
        "path": str(tmp_path),
        "untested": "99.1.0 is newer. Do this",
    }
    facts["hooks"] = {"schedule": {"total": 2, "missing": []}}
    found, hooks = findings._megatron(facts, None)
    assert (found.level, found.fix) == ("warning", "Do this") and "99.1.0 is newer" in found.text
    assert hooks.level == "ok"


def test_an_unsupported_megatron(tmp_path: Path) -> None:
    facts = {"version": "0.15.0", "path": str(tmp_path), "unsupported": "0.15.0 is not supported"}
    (found,) = findings._megatron(facts, None)
    assert found.level == "error" and found.fix
