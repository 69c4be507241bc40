"""Pairs of ranks behind one PCIe switch, from trees as sysfs shows them."""

from __future__ import annotations

import pytest

from megatron_ext.offload.pairs import bridges, by_switch, in_all

# An HGX board: two GPUs behind each switch. Root port, the switch's upstream and downstream port.
BOARD = {
    "0000:07:00.0": "pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:00.0",
    "0000:0f:00.0": "pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:10.0",
    "0000:47:00.0": "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0",
    "0000:4e:00.0": "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:10.0",
}
GPUS = tuple(BOARD)


@pytest.fixture
def root(tmp_path):
    links = tmp_path / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    for bus, above in BOARD.items():
        place = tmp_path / "sys/devices" / above / bus
        place.mkdir(parents=True)
        (links / bus).symlink_to(place)
    direct = tmp_path / "sys/devices/pci0000:80/0000:81:00.0"  # as in a virtual machine
    direct.mkdir(parents=True)
    (links / "0000:81:00.0").symlink_to(direct)
    return tmp_path


def places(root, *gpus, hosts="aaaaaaaa"):
    return [(host, bridges(gpu, root)) for host, gpu in zip(hosts, gpus)]


def test_bridges_above_a_device(root):
    assert bridges(GPUS[0], root) == ("0000:00:01.1", "0000:01:00.0", "0000:02:00.0")
    assert bridges("0000:81:00.0", root) == ()
    assert bridges("0000:99:00.0", root) is None and bridges(None, root) is None


def test_ranks_behind_one_switch_are_a_pair(root):
    assert by_switch(places(root, *GPUS)) == ((0, 1), (2, 3))
    # CUDA_VISIBLE_DEVICES=0,2,1,3: by number, no two would share a switch.
    mixed = [GPUS[i] for i in (0, 2, 1, 3)]
    assert by_switch(places(root, *mixed)) == ((0, 2), (1, 3))
    # Equal addresses on two hosts are two devices.
    assert by_switch(places(root, *GPUS[:2], *GPUS[:2], hosts="abcd")) == ()
    assert by_switch(places(root, *GPUS[:2], *GPUS[:2], hosts="abba")) == ((0, 3), (1, 2))
    assert by_switch(places(root, "0000:81:00.0", GPUS[0])) == ()
    assert by_switch(places(root, GPUS[0], "0000:99:00.0")) is None


def test_deeper_switches_first():
    """Four devices behind one root port, two behind each further switch: neighbours there."""
    paths = [("r", "x", "a"), ("r", "y", "b"), ("r", "x", "c"), ("r", "y", "d"), ("r", "z")]
    assert by_switch([("host", path) for path in paths]) == ((0, 2), (1, 3))
    assert by_switch([("host", ("r", name)) for name in "abcd"]) == ((0, 1), (2, 3))


def test_all_pipelines_follow_one_plan():
    both = ((0, 1), (2, 3))
    assert in_all([both, both]) == (both, "paired by PCIe switch: ranks 0 and 1, 2 and 3")
    assert in_all([both, ((0, 1),)])[0] == ((0, 1),)
    assert in_all([both, None]) == (
        None,
        "paired by number: the PCI tree cannot be read on every rank",
    )
    found, why = in_all([both, ((0, 2),)])
    assert found is None and why.startswith("paired by number: no two ranks share a PCIe switch")
