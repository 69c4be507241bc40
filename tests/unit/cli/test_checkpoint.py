"""``checkpoint``: layouts, interrupted saves, and pickles that are read without being run."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import types
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoints import folder as saved
from megatron_ext.checkpoints.folder import _plain
from megatron_ext.checkpoints.pickles import GlobalRef, PickledObject, read_pickle, read_saved
from megatron_ext.cli import main

ARGUMENTS = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "pp_placement": "vee",
    "pp_schedule": "v-half",
    "num_layers": 8,
    "world_size": 8,
    "consumed_train_samples": 80,
    "use_distributed_optimizer": True,
}


class Fakes:
    """Classes by the names that torch's have, so that pickles can be made without torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._made: dict[str, types.ModuleType] = {}

    def module(self, name: str) -> types.ModuleType:
        """Made once; with its parents, which pickle imports first, where there is no torch."""
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:
            self.module(parent)
        if name not in self._made:
            self._made[name] = types.ModuleType(name)
            self._patch.setitem(sys.modules, name, self._made[name])
        return self._made[name]

    def make(self, module: str, name: str) -> Any:
        kind = type(name, (), {"__module__": module, "__qualname__": name})
        setattr(self.module(module), name, kind)
        return kind


def given(kind: Any, **values: Any) -> Any:
    made = kind()
    made.__dict__.update(values)
    return made


def torch_saved(value: Any) -> bytes:
    """As ``torch.save`` writes what holds no tensors."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``write(iteration, sharding)``: a complete iteration, as Megatron 0.19 writes it."""
    fakes = Fakes(monkeypatch)
    module = "torch.distributed.checkpoint.metadata"
    metadata, tensor, index, place = (
        fakes.make(module, name)
        for name in ("Metadata", "TensorStorageMetadata", "MetadataIndex", "_StorageInfo")
    )
    root = tmp_path / "run"

    def make(iteration: int, sharding: str | None = "fully_reshardable") -> Path:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        state = {"args": Namespace(**ARGUMENTS), "iteration": iteration}
        if sharding is not None:
            state["content_metadata"] = {"distrib_optim_sharding_type": sharding}
        common = torch_saved([state])
        (folder / "__0_0.distcp").write_bytes(b"x" * 100 + common)
        (folder / "__1_0.distcp").write_bytes(b"y" * 50)
        keys = ["decoder.weight", "optimizer.state.exp_avg.decoder.weight"]
        held = {key: given(tensor, size=(4, 8)) for key in keys}
        spots = [("decoder.weight", 0, 0, 100), ("common_state/shard_0_1", 0, 100, len(common)),
                 (keys[1], 1, 0, 50)]  # fmt: skip
        stored = {
            given(index, fqn=key): given(
                place, relative_path=f"__{file}_0.distcp", offset=start, length=length
            )
            for key, file, start, length in spots
        }
        content = given(metadata, state_dict_metadata=held, storage_data=stored)
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (root / saved.TRACKER).write_text(str(iteration))
        return folder

    return make


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(["checkpoint", *argv])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_says_what_saved_it(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(10)
    status, text = run(capsys, str(folder.parent))
    assert status == 0
    assert "the next run loads iteration 10" in text and "iter_0000010: complete" in text
    assert "TP 2, PP 4, 2 chunks a rank in V placement, 8 ranks in all" in text
    assert "--pp-schedule 'v-half'" in text and "num_layers=8" in text
    assert "distributed, in the format fully_reshardable" in text
    assert "32 parameters" in text and "iteration 10, 80 samples" in text
    assert "every layout and schedule of this model" in text
    status, text = run(capsys, str(folder), "--json")
    assert status == 0 and json.loads(text)["layout"]["ranks"] == 8


def test_an_optimizer_that_fits_one_layout_only(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(10, "dp_reshardable")
    assert "only the one that saved it" in run(capsys, str(folder.parent))[1]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path, start: int, end: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(min(end, len(data)) - start) + data[end:])


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda f: (f / ".metadata").unlink(), ".metadata, which is written after all data, is m"),
        (
            lambda f: (f / ".metadata").write_bytes(b""),
            ".metadata, which is written after all data, is e",
        ),
        (lambda f: (f / "metadata.json").unlink(), "metadata.json, written last, is missing"),
        (lambda f: (f / "metadata.json").write_text("{"), "metadata.json is damaged"),
        (lambda f: _cut(f / ".metadata"), ".metadata cannot be read: it is no intact pickle"),
        (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda f: _cut(f / "__1_0.distcp"), "__1_0.distcp has 25 of 50 bytes"),
        (lambda f: _zero(f / "__1_0.distcp", 0, 50), "__1_0.distcp holds zeros"),
        (lambda f: _zero(f / "__1_0.distcp", 20, 50), "__1_0.distcp holds zeros"),
        (lambda f: _zero(f / "__0_0.distcp", 0, 50), "__0_0.distcp holds zeros"),
        (lambda f: _zero(f / ".metadata", 0, 10**5), ".metadata cannot be read"),
    ],
)
def test_an_interrupted_save(
    write: Any, capsys: pytest.CaptureFixture[str], harm: Any, what: str
) -> None:
    write(10)
    folder = write(20)
    harm(folder)
    status, text = run(capsys, str(folder.parent))
    assert status == 1 and "iter_0000010: complete" in text
    assert f"iteration 20 is incomplete ({what}" in text
    assert "the last complete one is 10: write 10 into" in text and "iteration 10:" in text
    (folder.parent / saved.TRACKER).write_text("10")
    status, text = run(capsys, str(folder.parent))
    assert status == 0 and "names 10" not in text


def test_a_description_that_cannot_be_read(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes are there, and damaged: a run that loads it ends with an error."""
    write(10)
    folder = write(20)
    _zero(folder / "__0_0.distcp", 100, 200)
    status, text = run(capsys, str(folder.parent))
    assert status == 1 and "the description of 20 cannot be read" in text and "write 10" in text
    status, text = run(capsys, str(folder))
    assert status == 1 and "the description of iter_0000020 cannot be read" in text


def test_a_complete_iteration_that_the_tracker_does_not_name(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(10).parent
    write(100)
    (root / saved.TRACKER).write_text("10")
    status, text = run(capsys, str(root))
    assert status == 0 and "iteration 100 in" in text and "--ckpt-step 100 would load it" in text
    found = saved.saved(root)
    assert saved.newer(root, found, 100) is saved.newer(root, found, "release") is None


@pytest.mark.parametrize("content", ["", "twenty", "-1", None, "30"])
def test_a_tracker_that_names_nothing(
    write: Any, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    tracker = write(10).parent / saved.TRACKER
    tracker.unlink()
    if content is not None:
        tracker.write_text(content)
    status, text = run(capsys, str(tracker.parent))
    assert status == 1 and "write 10 into" in text and "Traceback" not in text


def test_wrong_folders(tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, str(tmp_path / "none"))[0] == 2
    assert "holds no iter_" in run(capsys, str(tmp_path))[1]
    root = write(10).parent
    assert "has no iteration 7; it has 10" in run(capsys, str(root), "--iteration", "7")[1]


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /nowhere/at/all",)


def test_nothing_that_a_pickle_names_is_run() -> None:
    found = read_pickle(pickle.dumps({"a": [Bomb(), 1.5], "b": {1, 2}, "c": (None, True)}))
    bomb = found["a"][0]
    assert isinstance(bomb, PickledObject) and bomb.of == GlobalRef(os.system.__module__, "system")
    assert found["a"][1] == 1.5 and found["b"] == {1, 2} and found["c"] == (None, True)
    assert read_saved(torch_saved([{"x": 1}]), 1000) == [{"x": 1}]


@pytest.mark.parametrize(
    "data",
    [b"", b"no pickle", b"\x80\x04.", b"\x80\x04K\x01", b"\x80\x04]K\x01s.", b"\x80\x04}](K\x01u.",
     b"\x80\x04h\x05.", b"\x80\x04X\xff\xff\xff\x7fx.", b"\x80\x04r\xff\xff\xff\x7f.", b"u.",
     *(b"\x80\x05" + code + b"\xff" * 7 + b"\x3f." for code in (b"\x8e", b"\x95", b"\x96")),
     b"(ios\nsystem\n.", b"\x80\x02\x82\x01."],
)  # fmt: skip
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no intact pickle"):
        read_pickle(data)


# A list (protocol 4: "]", remembered: memo 0) or tuple, twice in the next one, and so on: 2**60 of
# them for whoever prints, compares or hashes it.
DOUBLED = b"".join(b"h%ch%c\x86\x940" % (i, i) for i in range(60)) + b"h\x3c"
LISTS, TUPLES = b"]\x940" + DOUBLED, b"K\x01\x85\x940" + DOUBLED
NAMED = b"\x8c\x01m\x8c\x01n\x93"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data",
    [TUPLES + b"\x8c\x01n\x93.", b"}" + TUPLES + b"K\x01s.", b"(" + TUPLES + b"K\x01d.",
     b"\x8f(" + TUPLES + b"\x90.", b"(" + TUPLES + b"\x91."],
)  # fmt: skip
def test_what_is_too_long_to_hash_or_print_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="requires str|more than 1000 parts"):
        read_pickle(b"\x80\x04" + data)


@pytest.mark.timeout(20)
def test_what_is_made_of_one_thing_many_times_is_named_briefly() -> None:
    for parts in (LISTS + b"\x85", TUPLES):
        assert (
            repr(read_pickle(b"\x80\x04" + NAMED + parts + b"R."))
            == "PickledObject(GlobalRef(module='m', name='n'))"
        )
        assert len(repr(read_pickle(b"\x80\x04" + parts + b"Q."))) < 100
    saved = b"\x80\x04" + NAMED + b")R}\x8c\x01a" + NAMED + LISTS + b"\x85Rsb."
    assert _plain(read_pickle(saved).values["a"]).startswith("n(")


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int) -> None:
    value = {"a": [1, -2, 2**70, 1.25, "ü", b"\0x", None, True], "b": ({"c": ()},), "d": set()}
    if protocol < 4:
        del value["d"]  # a call of set() there
    if protocol < 3:
        value["a"].remove(b"\0x")  # type: ignore[attr-defined]
    assert read_pickle(pickle.dumps(value, protocol)) == value
