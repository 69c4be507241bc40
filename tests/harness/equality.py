"""Ours trains what stock trains: the same losses, gradients and weights, tensor by tensor.

Names, shapes and places in the whole tensor are those of Megatron's checkpoints, whatever the
layout. Initial weights are a function of that name, so no checkpoint is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.harness import ranks

PEAK = re.compile(r"peak activations: (\S+) microbatches \(plan (\S+)\)")


@dataclass
class Trained:
    """What one run left, of all ranks.

    Attributes:
        losses: ``(step, name)`` to value; evaluations are steps of their own.
        tensors: gradients of the first step, where one fault is in one tensor, and of the last, and
            the weights after it.
        peaks: activations of the fullest rank in microbatches, (measured, planned), of every step
            of ours, as the log has them.
    """

    losses: dict[tuple[str, str], float] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    peaks: list[tuple[float, float]] = field(default_factory=list)


class Unequal(AssertionError):
    """Ours is not stock's: says where first."""


# ------------------------------------------------------------------ in a rank


def train(script: str, argv: Sequence[str]) -> dict[str, Any]:
    """Run the unmodified script under the launcher; returns this rank's losses and pieces."""
    from megatron.training import training

    from megatron_ext import launch

    losses: dict[tuple[str, str], float] = {}
    steps: list[list[tuple[str, tuple[int, ...], Any, np.ndarray]]] = []
    held: list[Any] = []
    count: list[None] = []
    setup, log, evaluate = (
        training.setup_model_and_optimizer,
        training.training_log,
        training.evaluate,
    )

    @functools.wraps(setup)
    def set_up(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, _ = result = setup(*args, **kwargs)
        entries = list(_entries(model))
        _fill(entries, optimizer)
        held[:] = model, entries
        step = optimizer.step

        @functools.wraps(step)
        def stepped(*a: Any, **k: Any) -> Any:
            _gather_gradients(model)
            count.append(None)
            steps.append(list(_pieces(f"step {len(count)}: gradient", entries)))
            del steps[1:-1]  # the first, where one fault shows in one tensor, and the last
            return step(*a, **k)

        optimizer.step = stepped
        return result

    @functools.wraps(log)
    def logged(loss_dict: Any, total: Any, rate: Any, iteration: int, *a: Any, **k: Any) -> Any:
        for name, value in loss_dict.items():
            losses[f"step {iteration}", name] = float(value)
        return log(loss_dict, total, rate, iteration, *a, **k)

    @functools.wraps(evaluate)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        count = len({step for step, _ in losses if step.startswith("evaluation")})
        for name, value in (result[0] or {}).items():
            losses[f"evaluation {count}", name] = float(value)
        return result

    training.setup_model_and_optimizer = set_up
    training.training_log, training.evaluate = logged, evaluated
    launch._leave = _leave
    if "--pp-schedule" in argv:
        from tests.support import races

        races.install(1009 + int(os.environ["RANK"]))  # late messages and copies, poisoned memory
    launch.main(["--device", "cpu", str(ranks.CHECKOUT / script), *argv])
    pieces = [piece for step in steps for piece in step]
    pieces += _pieces("trained weight", held[1])
    return {"losses": losses, "pieces": pieces, "peaks": PEAK.findall(ranks.log())}


def _leave(status: Any) -> None:
    if status:
        raise SystemExit(status)


def _entries(model: Sequence[Any]) -> Iterator[Any]:
    """The parameters of all chunks as sharded tensors, or factories of such."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.utils import unwrap_model

    for chunk in model:
        named = {id(p): name for name, p in unwrap_model(chunk).named_parameters()}
        for entry in nested_values(unwrap_model(chunk).sharded_state_dict()):
            if named.pop(id(getattr(entry, "data", None)), None):
                yield entry
        assert not named, f"parameters without a name in checkpoints: {sorted(named.values())}"


def _built(entry: Any, tensor: Any) -> list[Any]:
    """What the checkpoint would hold of ``tensor``, which is of the entry's parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(entry, ShardedTensorFactory):
        return list(nested_values(dataclasses.replace(entry, data=tensor).build()))
    return [dataclasses.replace(entry, data=tensor, dtype=tensor.dtype)]


def _fill(entries: Sequence[Any], optimizer: Any) -> None:
    """Weights as a function of their name, and the optimizer's copies of them."""
    import torch

    with torch.no_grad():
        for entry in entries:
            for piece in _built(entry, entry.data.detach()):
                draw = torch.Generator().manual_seed(zlib.crc32(piece.key.encode()))
                whole = torch.randn(piece.global_shape, generator=draw) * 0.1
                if "norm" in piece.key and piece.key.endswith("weight"):
                    whole += 1
                piece.data.copy_(whole[piece.global_slice()].view(piece.data.shape))
    optimizer.reload_model_params()


def _gather_gradients(model: Sequence[Any]) -> None:
    """Make gradients whole where each rank of a distributed optimizer has reduced a part."""
    import torch
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for chunk in model:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.ddp_config.use_distributed_optimizer:
                over = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    own = shard_buffer(bucket.grad_data, over.size())[over.rank()].clone()
                    torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=over)


def _pieces(kind: str, entries: Sequence[Any]) -> Iterator[tuple[str, Any, Any, np.ndarray]]:
    for entry in entries:
        tensor = entry.data
        if kind.endswith("gradient"):
            tensor = getattr(tensor, "main_grad", None)
            if tensor is None:
                tensor = entry.data.grad
        if tensor is not None:
            for piece in _built(entry, tensor.detach()):
                value = piece.data.float().numpy().copy()  # exact from bf16 too
                yield f"{kind} {piece.key}", tuple(piece.global_shape), piece.global_slice(), value


# ------------------------------------------------------------------ in the test


def trained(script: str, argv: Sequence[str], world: int) -> Trained:
    """Train on ``world`` ranks and put the pieces together.

    Raises:
        Unequal: two ranks hold different values of one place, or a place nobody holds.
    """
    found = ranks.run(train, world, script, list(argv))
    peaks = [(float(a), float(b)) for of in found for a, b in of["peaks"]]
    result = Trained(peaks=peaks)
    seen: dict[str, np.ndarray] = {}
    for rank, of in enumerate(found):
        for key, value in of["losses"].items():
            _same(result.losses.setdefault(key, value), value, f"loss {key} of rank {rank}")
        for name, shape, place, value in of["pieces"]:
            whole = result.tensors.setdefault(name, np.zeros(shape, np.float32))
            there = seen.setdefault(name, np.zeros(shape, bool))
            value = value.reshape(whole[place].shape)
            both = there[place]
            if not np.array_equal(whole[place][both], value[both], equal_nan=True):
                raise Unequal(f"{name}: rank {rank} and a rank before it hold different copies")
            whole[place], there[place] = value, True
    for name, there in seen.items():
        if not there.all():
            raise Unequal(f"{name}: no rank holds {int((~there).sum())} of {there.size} elements")
    return result


def _same(a: float, b: float, what: str) -> None:
    if a != b and not (np.isnan(a) and np.isnan(b)):
        raise Unequal(f"{what} is {b!r}, of a rank before it {a!r}")


def compare(what: str, stock: Trained, ours: Trained, tolerance: float = 0.0) -> float:
    """The largest relative difference, if it is within ``tolerance``.

    Raises:
        Unequal: names ``what``, the first unequal value in the order losses, gradients, weights,
            and both values.
    """
    worst, unequal = 0.0, []
    if stock.losses.keys() != ours.losses.keys():
        raise Unequal(f"{what}: losses {sorted(ours.losses)}, stock {sorted(stock.losses)}")
    if stock.tensors.keys() != ours.tensors.keys():
        odd = sorted(stock.tensors.keys() ^ ours.tensors.keys())
        raise Unequal(f"{what}: tensors of one side only: {odd[:6]}")
    stocks, mine = _by_name(stock), _by_name(ours)
    for name in sorted(stocks, key=lambda name: (name.split(":")[0], "loss" not in name, name)):
        there, here = stocks[name], mine[name]
        if here.shape != there.shape:
            unequal.append(f"{name}: shape {here.shape}, stock {there.shape}")
            continue
        off = _difference(there, here)
        worst = max(worst, off)
        if off > tolerance:
            at = np.unravel_index(int(np.argmax(np.abs(there - here))), there.shape)
            unequal.append(
                f"{name}{[int(i) for i in at] or ''}: stock {float(there[at])!r}, "
                f"ours {float(here[at])!r} ({int((there != here).sum())} of {there.size} differ)"
            )
    if unequal:
        raise Unequal(
            f"{what}: {len(unequal)} of {len(stocks)} values are not "
            f"stock's (within {tolerance:g}); the first:\n  " + "\n  ".join(unequal[:4])
        )
    return worst


def _by_name(of: Trained) -> dict[str, np.ndarray]:
    losses = {f"{step}: loss {name}": np.float64(v) for (step, name), v in of.losses.items()}
    return {**losses, **of.tensors}


def _difference(a: Any, b: Any) -> float:
    """Of two tensors, relative to the largest element; 0 only where all bits are equal."""
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max() / max(np.abs(a).max(), np.abs(b).max()))
