"""Recorded tensors put together and compared: what differences are found, and what they are called.

Files are written as ranks write them, without training.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.prove.compare import compare
from megatron_ext.prove.tensors import Key, read

S, H, V, M = 8, 4, 8, 2  # tokens, hidden size, vocabulary, microbatches


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks of a recorded run: TP x CP x DP, one pipeline stage."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    @property
    def world(self):
        return self.tp * self.cp * self.dp

    def place(self, rank):
        tp, rest = rank % self.tp, rank // self.tp
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": 1, "ep": 1}
        ranks = {"tp": tp, "cp": rest % self.cp, "dp": rest // self.cp, "pp": 0, "ep": 0}
        return {
            **sizes,
            **{f"{name}_rank": value for name, value in ranks.items()},
            "microbatches": M // self.dp,
            "sequence": S,
            "sequence_parallel": int(self.sequence_parallel),
            "per_token": 0,
        }


def whole(name, sample):
    torch.manual_seed(hash((name, sample)) % 1000)
    return torch.randn((S, 1, V if name == "output_layer" else H), dtype=torch.float64)


def weight(step):
    torch.manual_seed(step)
    return torch.randn((2, 4, H), dtype=torch.float64)


def write(folder, layout, change=lambda rank, what, name, sample, tensor: tensor, steps=1):
    """Files of a run whose every tensor ``change`` may spoil."""
    folder.mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        for rank in range(layout.world):
            place = layout.place(rank)
            passes = []
            for k in range(M // layout.dp):
                sample = k * layout.dp + place["dp_rank"]
                for what, name in (("F", "layer 1"), ("F", "output_layer"), ("B", "layer 1")):
                    tensor = part(whole(name, (what, sample, step)), name, place)
                    if what == "B":
                        tensor = tensor * layout.dp * layout.cp
                    passes.append((what, k, 0, name, change(rank, what, name, sample, tensor)))
            rows = 4 // layout.tp
            at = place["tp_rank"] * rows
            own = weight(step)[:, at : at + rows]
            values = [
                ("gradient", "w", (0, at, 0), (2, 4, H), change(rank, "gradient", "w", -1, own)),
                ("weight", "w", (0, at, 0), (2, 4, H), change(rank, "weight", "w", -1, own)),
            ]
            found = {"place": place, "ends": [], "passes": passes, "values": values}
            torch.save(found, folder / f"rank{rank}-step{step}.pt")


def part(tensor, name, place):
    if place["cp"] > 1:
        chunks, r = tensor.chunk(2 * place["cp"]), place["cp_rank"]
        tensor = torch.cat([chunks[r], chunks[-1 - r]])
    if name == "output_layer":
        return tensor.chunk(place["tp"], -1)[place["tp_rank"]]
    return tensor.chunk(place["tp"])[place["tp_rank"]] if place["sequence_parallel"] else tensor


LAYOUTS = [Layout(2), Layout(2, 1, 1, True), Layout(1, 2), Layout(1, 1, 2), Layout(2, 2, 2, True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_make_the_whole(tmp_path, layout):
    write(tmp_path / "one", Layout())
    write(tmp_path / "run", layout)
    made = compare(tmp_path / "run", layout.world, tmp_path / "one", 1, "double")
    assert made.equal and made.tensors == 3 * M + 2 and not made.skipped and not made.absent
    step = read(tmp_path / "run", layout.world, 1)
    assert torch.equal(step.wholes[Key("gradient", "w")].tensor, weight(1))


def first(tmp_path, layout, change, **options):
    write(tmp_path / "one", Layout(), **options)
    write(tmp_path / "run", layout, change, **options)
    steps = options.get("steps", 1)
    made = compare(tmp_path / "run", layout.world, tmp_path / "one", steps, "double")
    assert not made.equal
    return made.differences[0]


def test_numbers_where_one_process_has_zeros_alone(tmp_path):
    """As the bias of a router's choice while all experts get as many tokens."""
    zeros = only("gradient", torch.zeros_like)
    write(tmp_path / "one", Layout(), zeros)
    write(tmp_path / "zeros", Layout(2), zeros)
    write(tmp_path / "run", Layout(2))
    assert compare(tmp_path / "zeros", 2, tmp_path / "one", 1, "double").equal
    (found,) = compare(tmp_path / "run", 2, tmp_path / "one", 1, "double").differences
    assert str(found.key) == "gradient of w" and " off " not in found.text


def only(what, spoil, ranks=None):
    """A change of one kind of tensor."""

    def change(rank, kind, name, sample, tensor):
        good = kind != what or (ranks is not None and rank not in ranks)
        return tensor if good else spoil(tensor)

    return change


CAUSES = {
    "a factor of the layout": (Layout(1, 1, 2), only("gradient", lambda t: t * 2), "2 DP ranks"),
    "its inverse": (Layout(2), only("gradient", lambda t: t / 2), "1/2 times the right value"),
    "a number that is no size": (Layout(), only("gradient", lambda t: t * 0.3), "0.3 times"),
    "zero": (Layout(2), only("gradient", torch.zeros_like), "zero"),
    "not a number": (Layout(), only("B", lambda t: t * float("nan")), "not a number"),
    "copies": (Layout(1, 1, 2), only("gradient", lambda t: t + 0.1, {1}), "a reduction over DP"),
    "rows": (Layout(), only("gradient", lambda t: t.flip(0)), "rows in another order"),
    "weights": (Layout(), only("weight", lambda t: t + t**2), "all gradients are right"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_causes(tmp_path, name):
    layout, change, words = CAUSES[name]
    found = first(tmp_path, layout, change)
    assert words in found.cause
    assert found.json["pass"] == found.key.what and found.text.startswith("step 1: ")


def test_messages_in_another_order(tmp_path):
    other = {(f"F{s}"): whole("layer 1", ("F", 1 - s, 1)) for s in range(M)}

    def swapped(rank, what, name, sample, tensor):
        return other[f"F{sample}"] if (what, name) == ("F", "layer 1") else tensor

    found = first(tmp_path, Layout(), swapped)
    assert found.key == Key("F", "layer 1", 0) and "equal to that of microbatch 1" in found.cause


def test_a_value_of_the_step_before(tmp_path):
    def stale(rank, what, name, sample, tensor):
        return weight(1) if what == "weight" else tensor

    found = first(tmp_path, Layout(), stale, steps=2)
    assert found.step == 2 and "equal to that of the step before" in found.cause


def test_one_ranks_part_is_named(tmp_path):
    found = first(tmp_path, Layout(2), only("gradient", lambda t: t + t**2, {1}))
    assert found.ranks == (1,) and found.where == " [0:2, 2:4, 0:4]"


def test_what_no_rank_has(tmp_path):
    write(tmp_path / "one", Layout())
    write(tmp_path / "run", Layout())
    file = tmp_path / "run" / "rank0-step1.pt"
    found = torch.load(file)
    torch.save({**found, "values": found["values"][1:], "passes": found["passes"][:-1]}, file)
    made = compare(tmp_path / "run", 1, tmp_path / "one", 1, "double")
    assert [one.cause for one in made.differences] == ["no rank has this parameter"]
    assert made.absent == ["B of layer 1"]


def test_rounding_is_no_difference_and_exact_has_none(tmp_path):
    write(tmp_path / "one", Layout())
    write(tmp_path / "run", Layout(), only("gradient", lambda t: t * (1 + 2.0**-50)))
    arguments = (tmp_path / "run", 1, tmp_path / "one", 1)
    assert compare(*arguments, "double").equal
    assert not compare(*arguments, "exact").equal


def test_slices_have_names_and_lengths_of_their_own(tmp_path):
    """Of 5 and 3 tokens; what the model gets and its losses are the whole sequence's."""
    tokens, ends = torch.arange(S)[None], (5, S)
    for name in ("one", "run"):
        write(tmp_path / name, Layout())
        file = tmp_path / name / "rank0-step1.pt"
        found = torch.load(file)
        passes = [
            (what, j, k, name, whole)
            for j in range(M)
            for k, (begin, end) in enumerate(((0, 5), ends))
            for what, name, whole in (
                ("F", "tokens", tokens),
                ("F", "layer 1", torch.full((end - begin, 1, H), float(j + k), dtype=torch.double)),
            )
        ]
        torch.save({**found, "passes": passes, "ends": list(ends)}, file)
    made = compare(tmp_path / "run", 1, tmp_path / "one", 1, "exact")
    assert made.equal and made.tensors == 4 * M + 2 and not made.skipped
    second = read(tmp_path / "run", 1, 1).wholes[Key("F", "layer 1, slice 1", 1)].tensor
    assert second.shape == (3, 1, H) and second.unique().tolist() == [2.0]
