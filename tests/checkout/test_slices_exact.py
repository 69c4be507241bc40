"""``--pp-slices`` in float64: every output and gradient is that of one process with the same
slices, bit for bit, and that of whole microbatches within 1e-14."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.prove.compare import compare, losses, read
from megatron_ext.prove.flags import Flags
from megatron_ext.schedule import Action, Op, Placement, Schedule, check, save
from megatron_ext.schedule.units import Unit, units_of
from tests.support import recorded, short_documents, unhooked_slices, warm
from tests.support.checkouts import MAIN_TAG, existing, nightly
from tests.support.proofs import Proofs
from tests.support.server import ScriptServer

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 22
--max-position-embeddings 22 --mock-data --tokenizer-type NullTokenizer --vocab-size 63
--make-vocab-size-divisible-by 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 2
--lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-4
--log-interval 1 --eval-interval 100 --eval-iters 0 --transformer-impl local
--untie-embeddings-and-output-weights --ckpt-format torch_dist --rerun-mode disabled
--no-check-for-nan-in-loss-and-grad --clip-grad 0"""
PIPELINE = "--pipeline-model-parallel-size 2 --pp-schedule v-half --pp-slices 3"
STEPS = 2

EXPERTS = """--num-experts 4 --disable-bias-linear --moe-router-topk 2 --moe-z-loss-coeff 0.1
--moe-token-dispatcher-type alltoall"""
AUX, SEQUENCE, GLOBAL = (
    f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0.1"
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
)
ALL_LOSSES = """--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss
--moe-aux-loss-coeff 0.1 0.1 0.1"""
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
ROPE = "--position-embedding-type rope --group-query-attention --num-query-groups 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

DEPTHS = """--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --position-embedding-type rope"""
LATENT = """--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope --normalization RMSNorm
--disable-bias-linear"""

Sessions = Callable[..., tuple[Proofs, Flags]]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    script = existing(MAIN_TAG) / "pretrain_gpt.py"
    with ScriptServer(script, warm.python(""), double=True) as started:
        yield started


@pytest.fixture
def sessions(server: ScriptServer, tmp_path: Path) -> Sessions:
    """The runs of a model with these flags beside ``MODEL`` and ``PIPELINE``, on so many ranks."""

    def made(text: str, ranks: int = 2, prelude: object = recorded) -> tuple[Proofs, Flags]:
        flags = Flags([*MODEL.split(), *PIPELINE.split(), *text.split()])
        return Proofs(server, ranks, STEPS, tmp_path, prelude.__file__), flags

    return made


def from_whole(run: Proofs, flags: Flags) -> float:
    """The largest relative difference of a gradient or loss in slices from that of whole
    microbatches, in one process."""
    whole = flags.copy()
    whole.drop("--pp-slices")
    sliced, entire = run.reference(flags), run.reference(whole)
    worst = 0.0
    for step in range(1, STEPS + 1):
        found, wanted = read(sliced, 1, step)[0], read(entire, 1, step)[0]
        assert wanted.keys() == found.keys()
        for key, tensor in wanted.items():
            if key[0] == "gradient":
                worst = max(worst, float((found[key] - tensor).abs().max() / tensor.abs().max()))
        for name, value in losses(entire)[step - 1].items():
            worst = max(worst, abs(losses(sliced)[step - 1][name] / value - 1))
    return worst


def require_exact(run: Proofs, flags: Flags) -> None:
    """All but what Megatron sums over ranks (the norm of gradients) has the same bits."""
    made = run.check("layout", flags)
    assert not made.differences and made.compared > 50, made
    assert (made.largest["gradient"], made.largest["weight"]) == (0.0, 0.0), made


LOOPED = "--num-virtual-stages-per-pipeline-rank 2"
ORDERS = {
    "1f1b": "",
    "interleaved": LOOPED,
    "zb-h1": "",
    "interleaved-zb": LOOPED,
    "v-min": "",
    "v-half": "",
    "v-zb": "",
    "v-cap": "--pp-memory-cap 1",
}


@pytest.mark.matrix
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("name", ORDERS)
def test_schedules(sessions: Sessions, name: str, number: int) -> None:
    words = f"{ROPE} --pp-schedule {name} --pp-slices {number} {ORDERS[name]}"
    run, given = sessions(words, 2)
    require_exact(run, given)
    assert from_whole(run, given) < 1e-14


def random_order(seed: int, number: int, microbatches: int = 4) -> Schedule:
    """Any order of two ranks with so many slices, which a training can run."""
    rng, units = random.Random(seed), units_of([number] * microbatches)
    falling = sorted(units, key=lambda unit: (unit.microbatch, -unit.slice))
    left = {
        (op, s): [*(units if op is Op.F else falling)] for op in (Op.F, Op.B, Op.W) for s in (0, 1)
    }
    ended: set[tuple[Op, int, Unit]] = set()
    rows: list[list[Action]] = [[], []]

    def ready(op: Op, stage: int, unit: Unit) -> bool:
        needs = [(op, stage + (1 if op is Op.B else -1), unit)] if op is not Op.W else []
        needs += [(Op.F if op is Op.B else Op.B, stage, unit)] if op is not Op.F else []
        if op is Op.B and stage == 1:  # of the microbatch's last slice first
            needs = [(Op.F, 1, unit)]
        return all(need in ended for need in needs if need[1] in (0, 1))

    while any(left.values()):
        op, stage = rng.choice([key for key, lane in left.items() if lane])
        unit = left[op, stage][0]
        if ready(op, stage, unit):
            ended.add((op, stage, left[op, stage].pop(0)))
            rows[stage].append(Action(op, stage, unit))
    made = Schedule("random", Placement.loop(2), microbatches, tuple(map(tuple, rows)))
    made = replace(made, slices=(number,) * microbatches)
    check(made)
    return made


@pytest.mark.parametrize("seed", [nightly(seed) for seed in range(20)])
def test_any_order(sessions: Sessions, seed: int, tmp_path: Path) -> None:
    """From a schedule file, whose slices need no flag but are the reference's here."""
    save(random_order(seed, 3), tmp_path / "order.json")
    run, given = sessions(f"{ROPE} --pp-schedule {tmp_path / 'order.json'}", 2)
    require_exact(run, given)


@pytest.mark.parametrize(
    "flags",
    [
        f"{EXPERTS} {ALL_LOSSES} {FULL}",
        nightly(f"{EXPERTS} {ALL_LOSSES} --calculate-per-token-loss"),
        nightly(f"{EXPERTS} {AUX}"),
        nightly(f"{EXPERTS} {SEQUENCE}"),
        nightly(f"{EXPERTS} {GLOBAL}"),
        nightly(f"{EXPERTS} {SEQUENCE} {BIAS} --moe-shared-expert-intermediate-size 32"),
        nightly(
            f"{EXPERTS} {AUX} --recompute-granularity selective --recompute-modules moe core_attn"
        ),
    ],
)
def test_experts(sessions: Sessions, flags: str) -> None:
    run, given = sessions(flags, 2)
    require_exact(run, given)
    assert from_whole(run, given) < 1e-14


@pytest.mark.parametrize(
    "flags",
    [
        f"--pp-schedule 1f1b --pp-offload full --pp-memory-cap 0.7 {ROPE}",
        nightly(f"--pp-offload full {EXPERTS} {AUX}"),  # measured in the first step
        nightly("--pp-schedule zb-h1 --pp-offload auto"),
        nightly("--pp-offload half --recompute-granularity selective "
                "--recompute-modules core_attn"),
    ],
)  # fmt: skip
def test_offload(sessions: Sessions, flags: str, tmp_path: Path) -> None:
    """Every slice's set travels by itself; the keys and values of the microbatch stay."""
    run, given = sessions(flags, 2)
    require_exact(run, given)
    (folder,) = tmp_path.glob("*-layout")
    log = "".join((folder / f"rank{rank}.log").read_text() for rank in range(2))
    found = re.findall(r"offload: (\d+) of (\d+) activation sets a step are offloaded", log)
    assert found and all(0 < int(moved) < int(sets) for moved, sets in found), log
    peaks = re.findall(r"peak activations: ([\d.]+) microbatches \(plan ([\d.]+)\)", log)
    assert peaks and peaks[-1][0] == peaks[-1][1], peaks


def test_a_profile(sessions: Sessions, tmp_path: Path) -> None:
    """An order for measured times changes no bit."""
    run, given = sessions(f"{ROPE} --pp-profile-steps 1", 2)
    require_exact(run, given)
    (folder,) = tmp_path.glob("*-layout")
    log = (folder / "rank0.log").read_text()
    assert "the order stays" in log or "re-planned" in log


def require_one_sum(
    run: Proofs, flags: Flags, ranks: int, tmp_path: Path, other_name: str = "1f1b"
) -> None:
    """Where one process adds in another order than ranks do, two schedules have the same bits."""
    assert from_whole(run, flags) < 1e-14
    one = run.check("v", flags)
    flags.append("--pp-schedule", other_name)
    other = run.check("row", flags)
    assert not one.differences and not other.differences, (one, other)
    (v,), (row,) = tmp_path.glob("*-v"), tmp_path.glob("*-row")
    made = compare(v, ranks, row, STEPS, 0.0, ranks)
    assert (made.largest["gradient"], made.largest["weight"]) == (0.0, 0.0), made


@pytest.mark.matrix
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_on_several_ranks(sessions: Sessions, dispatcher: str, tmp_path: Path) -> None:
    """Their products have other shapes than in one process."""
    words = f"{EXPERTS} {SEQUENCE} {BIAS} --expert-model-parallel-size 2"
    run, flags = sessions(f"{words} --moe-token-dispatcher-type {dispatcher}", 4)
    require_one_sum(run, flags, 4, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        DEPTHS,
        nightly(f"{DEPTHS} {FULL}"),
        # One rank that has both copies adds them before it divides by the tokens.
        nightly(f"{DEPTHS} --calculate-per-token-loss {EXPERTS} {AUX} --pp-schedule zb-h1"),
    ],
)
def test_multi_token_prediction(sessions: Sessions, flags: str, tmp_path: Path) -> None:
    """The last stage has another copy of the embedding, whose gradient is added at the end."""
    run, given = sessions(flags, 2)
    require_one_sum(run, given, 2, tmp_path)
    whole = given.copy()
    whole.drop("--pp-slices")
    logs = [(run.reference(one) / "rank0.log").read_text() for one in (given, whole)]
    printed = [re.findall(r"mtp_\d+ loss: (\S+)", log) for log in logs]
    assert printed[0] == printed[1] and len(printed[0]) == 2 * STEPS


@pytest.mark.parametrize(
    "flags",
    [
        nightly(f"--window-size 5,0 {ROPE}"),
        nightly("--reset-attention-mask --reset-position-ids --pp-schedule zb-h1"),
        nightly(f"--qk-layernorm {ROPE}"),
        nightly(f"{LATENT} --rope-type yarn"),
        nightly(f"{LATENT} --rope-type rope --recompute-granularity selective "
                "--recompute-modules mla_up_proj core_attn"),
    ],
)  # fmt: skip
def test_attention(sessions: Sessions, flags: str) -> None:
    run, given = sessions(flags, 2)
    require_exact(run, given)
    assert from_whole(run, given) < 1e-14


@pytest.mark.parametrize(
    "flags",
    [
        f"--pp-schedule zb-h1 {ROPE}",
        nightly(f"{EXPERTS} {SEQUENCE} --mtp-num-layers 0 {FULL}"),
        nightly(f"{LATENT} --rope-type yarn --pp-slices 5"),
        nightly("--mtp-num-layers 1 --position-embedding-type rope"),
    ],
)
def test_packed_documents(sessions: Sessions, flags: str, tmp_path: Path) -> None:
    """Slices cut documents of 1 to 8 tokens, each with its own positions and attention."""
    # Another length than elsewhere: Megatron keeps the index of a length's samples.
    packed = "--dataloader-inter-document-masking --micro-batch-size 1 --seq-length 20"
    run, given = sessions(f"{packed} {flags}", 2, short_documents)
    if "--mtp-num-layers 1" in flags:
        require_one_sum(run, given, 2, tmp_path)
    else:
        require_exact(run, given)
        assert from_whole(run, given) < 1e-14


@pytest.mark.parametrize(
    "flags",
    [
        ROPE,
        nightly(f"{EXPERTS} {ALL_LOSSES} {FULL}"),
        nightly("--pp-offload half"),
        nightly("--calculate-per-token-loss"),
    ],
)
def test_joined_weights(sessions: Sessions, flags: str, tmp_path: Path) -> None:
    """One product for all slices of a microbatch: the bits of no other sum, but of any schedule."""
    run, given = sessions(f"--pp-slice-weights joined {flags}", 2)
    require_one_sum(run, given, 2, tmp_path, "zb-h1")
    logs = [log.read_text() for log in tmp_path.glob("*-v/rank*.log")]
    found = [re.findall(r"peak activations: ([\d.]+) microbatches \(plan ([\d.]+)\)", log)
             for log in logs]  # fmt: skip
    assert all(a == b for one in found for a, b in one) and any(found)
    # Each of the two is another sum than one process with a W for every slice.
    (joined,) = tmp_path.glob("*-v")
    given.drop("--pp-slice-weights")
    assert not run.check("each", given).differences
    (each,) = tmp_path.glob("*-each")
    assert compare(joined, 2, each, STEPS, 0.0, 2).largest["gradient"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        nightly(f"--moe-pipeline-chunks 2 {ALL_LOSSES}"),
        nightly(f"--moe-pipeline-chunks 2 --moe-memory-reuse s1 {AUX} --pp-slice-weights joined"),
        nightly(f"--moe-pipeline-chunks 4 --moe-memory-reuse s4 {SEQUENCE} {BIAS}"),
        nightly(f"--moe-pipeline-chunks auto {GLOBAL}"),
    ],
)
def test_experts_in_chunks(sessions: Sessions, flags: str, tmp_path: Path) -> None:
    """Every slice's tokens in chunks of their own: sums of other parts than in one process."""
    run, given = sessions(f"{EXPERTS} {flags}", 2)
    require_one_sum(run, given, 2, tmp_path, "zb-h1")


@pytest.mark.matrix
def test_one_slice_is_the_whole(sessions: Sessions, tmp_path: Path) -> None:
    """Bit for bit the run without the flag; three slices are not."""
    run, flags = sessions(ROPE, 2)
    assert 0 < from_whole(run, flags) < 1e-14
    for name in ("one", "none"):
        flags.append("--pp-slices", 1)
        if name == "none":
            flags.drop("--pp-slices")
        assert not run.check(name, flags).differences
    (one,), (none,) = tmp_path.glob("*-one"), tmp_path.glob("*-none")
    made = compare(one, 2, none, STEPS, 0.0, 2)
    assert not made.differences and made.compared > 50 and not made.skipped


def test_the_comparisons_can_fail(sessions: Sessions) -> None:
    """Losses of experts, and of tokens behind, are far off slice by slice; other slices give
    other bits."""
    run, flags = sessions(f"{EXPERTS} {ALL_LOSSES}", 2, unhooked_slices)
    assert from_whole(run, flags) > 1e-3
    run, flags = sessions(DEPTHS, 2, unhooked_slices)
    assert from_whole(run, flags) > 1e-3
    first = run.reference(flags)
    flags.append("--pp-slices", 4)
    assert compare(run.reference(flags), 1, first, 1, 0.0).largest["gradient"] > 0
