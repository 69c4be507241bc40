"""Host memory: how much there is, where it lies, and how the arena divides it."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.offload import arena as arena_module
from megatron_ext.offload.arena import HostArena
from megatron_ext.offload.blocks import ALIGNMENT, padded
from megatron_ext.offload.device import CpuDevice, Direction, HostEvent
from megatron_ext.offload.host_memory import available_host_bytes
from megatron_ext.offload.rates import measure_rates

CPU = torch.device("cpu")
BUS = "0000:3b:00.0"


def write(root: Path, **files: Any) -> Path:
    """Files by path, with ``__`` for ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_no_byte_more_than_asked_for():
    arena = HostArena(CPU, 3 * padded(10_000))
    assert arena.capacity_bytes == 3 * 10_240  # A power of two would be 32,768.
    slots = [arena.allocate(10_000) for _ in range(3)]
    arena.seal()
    assert None not in slots and arena.allocate(1) is None
    assert arena.used_bytes == arena.peak_bytes == arena.capacity_bytes
    pointers = {slot.memory.data_ptr() for slot in slots}
    assert len(pointers) == 3 and all(p % ALIGNMENT == 0 for p in pointers)


def test_places_never_overlap_and_come_back_whole():
    rng = random.Random(0)
    arena = HostArena(CPU, 64 * 1024)
    arena.seal()
    held: list[tuple[Any, int]] = []
    for number in range(2000):
        if held and rng.random() < 0.5:
            slot, mark = held.pop(rng.randrange(len(held)))
            assert (slot.memory == mark).all()
            arena.free(slot)
        elif (slot := arena.allocate(rng.randint(1, 9000))) is not None:
            slot.memory.fill_(number % 251)
            held.append((slot, number % 251))
    for slot, _ in held:
        arena.free(slot)
    assert arena.used_bytes == 0
    whole = arena.allocate(64 * 1024)
    assert whole is not None and whole.memory.numel() == 64 * 1024


def test_grows_until_it_is_sealed():
    arena = HostArena(CPU, expected_sets=4)
    assert arena.capacity_bytes == 0
    first = arena.allocate(1000)
    assert arena.capacity_bytes == 4 * 1024
    others = [arena.allocate(1000) for _ in range(4)]  # One more than expected.
    assert arena.capacity_bytes == 5 * 1024
    arena.seal()
    assert arena.allocate(1000) is None
    arena.free(first)
    assert arena.allocate(1025) is None and arena.allocate(1024) is not None and None not in others


def test_memory_that_fits_is_not_taken_again():
    arena = HostArena(CPU, expected_sets=4)
    arena.free(arena.allocate(1024))  # a measurement's
    arena.expect(2)
    for slot in [arena.allocate(10_240) for _ in range(3)]:
        arena.free(slot)
    places = [region.memory.data_ptr() for region in arena._regions]
    assert [region.memory.numel() for region in arena._regions] == [4096, 20_480, 10_240]
    arena.resize(18_000)
    assert [r.memory.data_ptr() for r in arena._regions] == places[1:2]
    assert arena.capacity_bytes == 20_480 and arena.allocate(20_481) is None
    for needed in (20_481, 16_384, 16_000, 0):
        arena.resize(needed)
        # A quarter more than needed, or less than needed, is not kept.
        assert arena.capacity_bytes == padded(needed)


def test_a_place_being_read_is_busy_for_its_next_owner():
    arena = HostArena(CPU, 4096)
    low, high = arena.allocate(2048), arena.allocate(2048)
    reading, done = HostEvent(), HostEvent(done=True)
    arena.free(low, reading)
    arena.free(high, done)
    whole = arena.allocate(4096)
    assert whole.busy == [reading]
    arena.free(whole)
    assert arena.allocate(512).busy == [reading]
    reading.set_result(None)
    assert arena.allocate(512).busy == []


def test_available_memory_is_what_the_group_leaves(tmp_path):
    assert 0 < available_host_bytes() < 1 << 50
    files = {"proc__meminfo": "MemTotal: 99 kB\nMemAvailable:   64 kB\nBuffers: 1 kB"}
    assert available_host_bytes(write(tmp_path, **files)) == 64 * 1024
    write(tmp_path, **{"proc__self__cgroup": "0::/job/x"})
    job = "sys__fs__cgroup__job__x__memory"
    write(tmp_path, **{f"{job}.max": "max", f"{job}.current": 10})
    assert available_host_bytes(tmp_path) == 64 * 1024
    write(tmp_path, **{f"{job}.max": 50_000, f"{job}.current": 20_000})
    assert available_host_bytes(tmp_path) == 30_000
    # Version 1, seen from inside a container.
    v1 = "sys__fs__cgroup__memory__memory"
    write(tmp_path, **{f"{v1}.limit_in_bytes": 900, f"{v1}.usage_in_bytes": 1000})
    assert available_host_bytes(tmp_path) == 0


def test_rates_are_measured():
    throttle = {Direction.TO_HOST: 2e6, Direction.TO_DEVICE: 4e6}
    device = CpuDevice(throttle_bytes_per_second=throttle)
    rates = measure_rates(device, torch.empty(80_000, dtype=torch.uint8), repeats=2)
    device.close()
    # Sleeps never end early, only late.
    assert rates.to_host <= 2.01e6 and rates.to_device <= 4.01e6
    assert rates.to_host > 0 and rates.to_device > 0
    assert rates.to_host_together <= 2.01e6 and rates.to_device_together <= 4.01e6


def test_pinned_memory_is_unpinned_however_an_arena_ends(monkeypatch):
    """Closed, or collected with its model: after the device has ended its copies, and once."""
    log = []
    runtime = SimpleNamespace(cudaHostUnregister=lambda place: log.append(place))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(arena_module, "_pin", lambda memory, device: None)
    monkeypatch.setattr(arena_module, "pci_bus_id", lambda device: None)
    for close in (True, False):
        arena = HostArena(torch.device("cuda"), 4096)
        place = arena._regions[0].memory.data_ptr()
        if close:
            arena.close()
        del arena
        gc.collect()
        assert log[:2] == ["synchronize", place] and log.count(place) == 1
        log.clear()
