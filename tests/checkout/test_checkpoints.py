"""Checkpoints of the stock ``pretrain_gpt.py``: any schedule continues what any other saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests.configurations import MOE
from tests.configurations import TRAINED as BASE
from tests.support.checkouts import MAIN_TAG, OLDEST_TAG, Serve, nightly
from tests.support.server import Outcome, ScriptServer

pytestmark = [
    pytest.mark.timeout(900),
]

MODEL = BASE.replace("--untie-embeddings-and-output-weights", "").split()
MODEL += ["--train-iters", "5"]  # restarts go on after the second or the fourth
DISTRIBUTED = ["--bf16", "--use-distributed-optimizer"]
# Stock's own run needs the flag; under --pp-schedule this is the default.
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
TWO_CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]

# (schedule's flags, pipeline size): stock 1F1B on the first size, then each continues the one
# before for two iterations.
TOUR = (
    ([], 4),
    (["--pp-schedule", "v-half"], 2),
    (["--pp-schedule", "interleaved", *TWO_CHUNKS], 4),
    (["--pp-schedule", "v-zb"], 4),
    (RESHARDABLE, 1),
)


class Runs:
    """Training runs of one checkout, each in a folder of its own."""

    def __init__(self, server: ScriptServer, folder: Path, *model: str) -> None:
        self.server, self.folder, self.model = server, folder, model

    def train(self, name: str, pp: int, *flags: str, world: int | None = None) -> Outcome:
        """Train ``name`` (its checkpoints go to ``NAME/checkpoints``) and return how it ended."""
        argv = [*MODEL, *self.model, "--pipeline-model-parallel-size", str(pp), *flags]
        if "--save" not in argv and "--nosave" not in argv:
            argv += ["--save", str(self.checkpoints(name))]
            # Else the end of the training is saved.
            argv += [] if "--save-interval" in argv else ["--save-interval", "1000"]
        untied = [] if "--tied" in argv else ["--untie-embeddings-and-output-weights"]
        argv = [word for word in argv if word not in ("--nosave", "--tied")] + untied
        log = self.folder / f"{name}-log"
        return self.server.run(argv, world or pp, log)

    def checkpoints(self, name: str) -> Path:
        """Where ``name`` saves."""
        return self.folder / name

    def good(self, name: str, pp: int, *flags: str, world: int | None = None) -> list[float]:
        """Losses of a run that must end well."""
        outcome = self.train(name, pp, *flags, world=world)
        assert outcome.status == "ok", outcome.report
        return losses(outcome)


def losses(outcome: Outcome) -> list[float]:
    return [float.fromhex(entry["losses"]["lm loss"]) for entry in outcome.losses()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Runs:
    return Runs(serve(MAIN_TAG), tmp_path_factory.mktemp("main"))


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Runs:
    """One a stage of a V, two microbatches a rank of it."""
    words = "--num-layers", "4", "--global-batch-size", "4"
    return Runs(serve(MAIN_TAG), tmp_path_factory.mktemp("few"), *words)


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Runs:
    return Runs(serve(OLDEST_TAG), tmp_path_factory.mktemp("oldest"))


def saved(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, by its global name."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return found


def common(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors that has to continue: iteration, steps, schedule."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    state = load_common_state_dict(str(folder))
    # With experts there are several optimizers, by number.
    optimizer = state["optimizer"]
    each = [optimizer] if "optimizer" in optimizer else list(optimizer.values())
    groups = [group for one in each for group in one["optimizer"]["param_groups"]]
    return {
        "iteration": state["iteration"],
        "scheduler": state["opt_param_scheduler"],
        "steps": {group.get("step") for group in groups},
        "samples": state["args"].consumed_train_samples,
    }


def assert_equal(mine: Path, theirs: Path, also_common: bool = True) -> None:
    """Bit for bit the same parameters, optimizer state and counters, name by name."""
    import torch

    a, b = tensors(mine), tensors(theirs)
    assert a.keys() == b.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in a)
    different = [
        key for key in a if a[key].shape != b[key].shape or not torch.equal(a[key], b[key])
    ]
    assert different == []
    if also_common:
        assert common(mine) == common(theirs)


def tour(runs: Runs, legs: tuple[tuple[list[str], int], ...], steps: int = 2) -> None:
    """Each leg's losses and checkpoint are those of stock that is never interrupted."""
    every = [*DISTRIBUTED, "--train-iters", str(steps * len(legs)), "--save-interval", str(steps)]
    wanted = runs.good("stock", legs[0][1], *every, *RESHARDABLE)
    stock = runs.checkpoints("stock")
    previous = ["--load", str(stock), "--ckpt-step", str(steps)]
    for number, (flags, pp) in enumerate(legs[1:], start=1):
        name, end = f"leg{number}", steps * (number + 1)
        found = runs.good(name, pp, *every, *flags, *previous, "--exit-interval", str(steps))
        assert found == wanted[end - steps : end]
        mine = runs.checkpoints(name)
        assert_equal(saved(mine, end), saved(stock, end))
        previous = ["--load", str(mine)]


def test_tour(few_layers: Runs) -> None:
    """The optimizer's shards go into V-ZB in ``test_optimizer_in_shards``; by night here too."""
    tour(few_layers, (*TOUR[:2], TOUR[4]), 1)


@pytest.mark.matrix
def test_whole_tour(tmp_path: Path, serve: Serve) -> None:
    tour(Runs(serve(MAIN_TAG), tmp_path), TOUR)


@pytest.mark.matrix
@pytest.mark.version(OLDEST_TAG)
def test_tour_on_the_oldest_version(oldest: Runs) -> None:
    tour(oldest, (([], 2), TOUR[1], (["--pp-schedule", "interleaved", *TWO_CHUNKS], 2), TOUR[4]))


def test_optimizer_in_shards(few_layers: Runs) -> None:
    """With two data-parallel ranks, each of which holds half of every bucket's state. A V's buckets
    are many, with padding between them, which Megatron before 0.20 counts in one place only."""
    flags = [*DISTRIBUTED, "--exit-interval", "2"]
    few_layers.good("dp0", 1, *flags, *RESHARDABLE, world=2)
    load = ["--load", str(few_layers.checkpoints("dp0"))]
    wanted = few_layers.good("dp-stock", 1, *flags, *RESHARDABLE, *load, world=2)
    buckets = ["--overlap-grad-reduce", "--ddp-bucket-size", "1000"]
    vee = [*buckets, "--pp-schedule", "v-zb"]
    found = few_layers.good("dp-v", 2, *flags, *vee, *load, world=4)
    assert found == wanted
    mine, theirs = few_layers.checkpoints("dp-v"), few_layers.checkpoints("dp-stock")
    assert_equal(saved(mine, 4), saved(theirs, 4))


def random_states(folder: Path) -> dict[str, Any]:
    """Every rank's random state in a checkpoint, by its name there."""
    import torch
    import torch.distributed.checkpoint as dcp

    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    found = {}
    for index, place in places.items():
        if index.fqn.startswith("rng_state"):
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            found[index.fqn] = torch.load(data, weights_only=False)
    return {key: exact(value) for key, value in found.items()}


def exact(value: Any) -> Any:
    """Nested states with tensors and arrays as bytes, to be compared."""
    if isinstance(value, dict):
        return {key: exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [exact(inner) for inner in value]
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.tobytes() if hasattr(value, "tobytes") else value


@pytest.mark.matrix
def test_random_state_goes_on(runs: Runs) -> None:
    """With dropout, masks after a restart are those of a run that was never interrupted."""
    flags = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--pp-schedule", "v-half"]
    flags += [*DISTRIBUTED, "--train-iters", "4", "--save-interval", "2"]
    wanted = runs.good("dropout", 2, *flags)
    load = ["--load", str(runs.checkpoints("dropout")), "--ckpt-step", "2"]
    assert runs.good("dropout-again", 2, *flags, *load) == wanted[2:]
    mine, theirs = (saved(runs.checkpoints(f"dropout{x}"), 4) for x in ("-again", ""))
    assert_equal(mine, theirs)
    again, first = random_states(mine), random_states(theirs)
    assert len(first) >= 2 and again == first
    assert first != random_states(saved(runs.checkpoints("dropout"), 2))


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        # Stock cannot change the expert parallel size with the optimizer: it has one more then.
        nightly([*MOE.split(), "--expert-model-parallel-size", "2"], 2),
        # Two copies of the word embeddings on a rank, one of whose replicas saves them.
        nightly(["--mtp-num-layers", "1", "--position-embedding-type", "rope"], 2),
        nightly(["--swiglu", "--tied"], 2),
    ],
    ids=["experts", "mtp", "tied"],
)
def test_loaded_and_saved_again(runs: Runs, model: list[str], ranks: int, request: Any) -> None:
    """Models with more than plain layers: into a V and out, nothing lost, changed or doubled."""
    name = request.node.callspec.id
    base = [*DISTRIBUTED, "--train-iters", "2", *model]
    runs.good(f"{name}-stock", 1, *base, *RESHARDABLE, world=ranks)
    load = ["--load", str(runs.checkpoints(f"{name}-stock"))]
    found = runs.good(f"{name}-v", 2, *base, "--pp-schedule", "v-half", *load, world=2 * ranks)
    assert found == []
    mine, theirs = (saved(runs.checkpoints(f"{name}-{x}"), 2) for x in ("v", "stock"))
    assert_equal(mine, theirs)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        ([], "zb-h1"),
        nightly(["--swiglu", "--tied"], "v-half"),
        nightly(["--mtp-num-layers", "2", "--position-embedding-type", "rope"], "v-half"),
    ],
    ids=["untied", "tied", "mtp"],
)
def test_vocabulary_on_all_ranks(
    few_layers: Runs, model: list[str], schedule: str, request: Any
) -> None:
    """Into parts of the vocabulary on all ranks, and out again."""
    names = [f"{request.node.callspec.id}-{x}" for x in ("whole", "parts", "again")]
    base = [*DISTRIBUTED, "--train-iters", "2", *model]
    few_layers.good(names[0], 2, *base, *RESHARDABLE)
    ours = ["--pp-schedule", schedule, "--pp-vocab-parallel"]
    for flags, before, name in zip((ours, RESHARDABLE), names, names[1:]):
        load = ["--load", str(few_layers.checkpoints(before))]
        assert few_layers.good(name, 2, *base, *flags, *load) == []
    whole, parts, again = (saved(few_layers.checkpoints(name), 2) for name in names)
    assert_equal(parts, whole)
    assert_equal(again, whole)
