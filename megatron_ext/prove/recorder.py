"""What every rank writes down: each layer's output and its gradient, and each parameter's values.

A server's job runs this file first (``prelude``); ``prepare`` hooks Megatron's training loop. A
rank then writes ``rankR-stepN.pt`` after every step, a dictionary of

    place    sizes and ranks of its groups, microbatches, sequence parallelism
    ends     of the slices of a sequence; empty: it is not cut
    passes   (pass, microbatch, slice, name, tensor): F is a module's output, B the gradient of it;
             a microbatch is the rank's own, from 0; a name is ``layer 3`` or a module's
    values   (what, global name, offset in the global tensor, its shape, tensor): ``gradient`` as
             the optimizer gets it, ``weight`` and the optimizer's state after the step
    states   of ranks whose own state a checkpoint keeps: ``schedule`` before the step, ``random``
             after it

``rankR-step0.pt`` has the random states at the start, ``rankR-evaluation.pt`` the losses of an
evaluation and the step before it.

Global names and offsets are those of Megatron's checkpoints (``sharded_state_dict``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.integration.features.slices.wanted import Wanted

_LAYER = re.compile(r"(?:^|\.)layers\.\d+$")
# Modules beside the layers whose outputs are written down.
_OTHERS = ("embedding", "output_layer")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare(value: Any, rank: int, folder: Path) -> None:
    """Record this rank's training into ``folder``.

    Args:
        value: ``late``, a seed or None: messages then come late and in a random order of
            completion; ``uneven``: samples have different numbers of tokens that count;
            ``slices``: as ``Flags.slices`` says;
            ``alone``: one process runs the slices, without flags of ours.
        rank: of all.
        folder: for the files.
    """
    from megatron.training import training

    # All tensors of so small a model would stay on the device.
    os.environ.setdefault("MEGATRON_EXT_OFFLOAD_MIN_BYTES", "1")
    if value["uneven"]:
        _mask_unevenly()
    if value["late"] is not None:
        from megatron_ext.prove import races

        races.install(value["late"] * 1009 + rank)

    if value["slices"] and value["alone"]:
        from megatron_ext.integration.versions import megatron_version
        from megatron_ext.prove import one_process

        one_process.install(Wanted(*value["slices"]), megatron_version())

    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        model, optimizer, scheduler, *_ = result
        ends = _ends(value["slices"])
        recorders.append(Recorder(model, optimizer, scheduler, rank, Path(folder), ends))
        return result

    training.setup_model_and_optimizer = recorded
    recorders: list[Recorder] = []
    losses: dict[str, torch.Tensor] = {}
    evaluate = training.evaluate

    @functools.wraps(evaluate)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if recorders and result[0]:
            for name, loss in result[0].items():
                # Megatron evaluates on the validation set, then on the test set.
                name += " of the test set" * (name in losses)
                losses[name] = torch.as_tensor(loss).double()
            found = {"step": recorders[-1].step, "losses": losses}
            torch.save(found, Path(folder) / f"rank{rank}-evaluation.pt")
        return result

    training.evaluate = evaluated


def _ends(slices: list[Any] | None) -> list[int]:
    """Where the slices of a sequence end; nothing where it is not cut."""
    from megatron.training import get_args

    args = get_args()
    return [] if slices is None else list(Wanted(*slices).cut(args.seq_length, args).ends)


def _mask_unevenly() -> None:
    """Leave tokens at the beginning of each sample out of the loss, another number in each."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    item = GPTDataset.__getitem__

    @functools.wraps(item)
    def masked(self: Any, index: int | None) -> Any:
        sample = item(self, index)
        mask = sample["loss_mask"].clone()
        mask[: (5 * (index or 0)) % (len(mask) // 2)] = 0
        return {**sample, "loss_mask": mask}

    GPTDataset.__getitem__ = masked


class Recorder:
    """Writes what the model chunks and the optimizer of this rank compute.

    Args:
        chunks: as Megatron wrapped them.
        optimizer: Megatron's.
        scheduler: of the learning rate, Megatron's.
        rank: of all.
        folder: for the files.
        ends: of the slices of a sequence; empty: it is not cut.
    """

    def __init__(
        self,
        chunks: list[Any],
        optimizer: Any,
        scheduler: Any,
        rank: int,
        folder: Path,
        ends: list[int],
    ) -> None:
        from megatron.core.utils import unwrap_model

        self.chunks = [unwrap_model(chunk) for chunk in chunks]
        self.optimizer, self.rank, self.folder = optimizer, rank, folder
        here = place()
        # Data-parallel ranks load the random states that the first of them saved.
        self.keeps = here["dp_rank"] == here["cp_rank"] == 0
        if self.keeps:
            torch.save({"states": {"random": random_states()}}, folder / f"rank{rank}-step0.pt")
        self.step, self.ends = 0, ends
        self.passes: list[tuple[str, int, int, str, torch.Tensor]] = []
        self.counters = [_Chunk(chunk, self.passes, len(ends) or 1) for chunk in self.chunks]
        step = optimizer.step

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            values = list(self._values(self._gradients()))
            states = {"schedule": schedule_states(optimizer, scheduler)} if self.keeps else {}
            result = step(*args, **kwargs)
            values += [*self._values(self._updated()), *self._buffers()]
            # Without dropout nothing else draws, and a lost state would be the right one.
            _draw()
            if self.keeps:
                states["random"] = random_states()
            self._write(values, states)
            return result

        optimizer.step = stepped

    def _write(self, values: list[Any], states: dict[str, Any]) -> None:
        self.step += 1
        found = {"place": place(), "ends": self.ends, "passes": list(self.passes)}
        found["values"], found["states"] = values, states
        self.passes.clear()
        for counter in self.counters:
            counter.unit = -1
        torch.save(found, self.folder / f"rank{self.rank}-step{self.step}.pt")

    def _optimizers(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def _gradients(self) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """(parameter, "gradient", tensor) of all parameters, whole also where the optimizer has a
        part of each."""
        parts = {id(p) for optimizer in self._optimizers() for p in _alike(optimizer)}
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is not None and id(parameter) not in parts:
                    yield parameter, "gradient", gradient.detach().clone()
        for optimizer in self._optimizers():
            for parameter in _alike(optimizer):
                span = _span(optimizer, parameter)
                part = None if span is None else parameter.main_grad.view(-1)[span]
                yield parameter, "gradient", _whole(optimizer, parameter, span, part)

    def _updated(self) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """(parameter, kind, tensor) of all weights, frozen ones too, and of the optimizer's state
        after the step."""
        parts = {id(p) for optimizer in self._optimizers() for p in _alike(optimizer)}
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if id(parameter) not in parts:
                    yield parameter, "weight", parameter.detach().clone()
        for optimizer in self._optimizers():
            yield from _parts(optimizer) if _alike(optimizer) else self._states(optimizer)

    def _states(self, optimizer: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """What an optimizer that has whole parameters holds."""
        inner: Any = getattr(optimizer, "optimizer", None)
        for chunk in self.chunks if inner is not None else ():
            for parameter in chunk.parameters():
                state = inner.state.get(getattr(parameter, "main_param", parameter))
                for kind, tensor in (state or {}).items():
                    if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                        yield parameter, kind, tensor.detach().clone()

    def _buffers(self) -> Iterator[Any]:
        """What checkpoints have beside parameters, such as the bias of a router's choice."""
        parameters = {p.data_ptr() for chunk in self.chunks for p in chunk.parameters()}
        for chunk in self.chunks:
            for entry in _entries(chunk):
                if entry.data.data_ptr() not in parameters and entry.data.is_floating_point():
                    for piece in _pieces(entry, entry.data):
                        yield _value("buffer", piece)

    def _values(self, given: Iterator[tuple[Any, str, torch.Tensor]]) -> Iterator[Any]:
        """``given`` in global names, in the pieces that Megatron's checkpoints have."""
        entries = {}
        for chunk in self.chunks:
            for entry in _entries(chunk):
                entries[entry.data.data_ptr()] = entry
        names = {id(p): name for chunk in self.chunks for name, p in chunk.named_parameters()}
        for parameter, what, tensor in given:
            entry = entries.get(parameter.data_ptr())
            if entry is None:
                yield what, f"{names[id(parameter)]} (rank {self.rank})", None, None, tensor
                continue
            for piece in _pieces(entry, tensor.view(parameter.shape)):
                yield _value(what, piece)


class _Chunk:
    """Writes the outputs of one model chunk's modules, and their gradients, into ``passes``.

    Args:
        slices: of a microbatch, each of which is a call of the chunk.
    """

    def __init__(self, chunk: Any, passes: list[Any], slices: int) -> None:
        self.passes, self.slices, self.unit, self.running = passes, slices, -1, False
        self.calls: dict[str, int] = {}  # of the modules in this microbatch
        chunk.register_forward_pre_hook(self._begin, with_kwargs=True)
        chunk.register_forward_hook(self._end)
        for name, module in chunk.named_modules():
            if _LAYER.search(name) and isinstance(getattr(module, "layer_number", None), int):
                kind = "MTP layer" if "mtp" in name.split(".") else "layer"
                module.register_forward_hook(
                    functools.partial(self._output, f"{kind} {module.layer_number}")
                )
            elif name in _OTHERS:
                module.register_forward_hook(functools.partial(self._output, name))

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self.unit, self.running = self.unit + 1, True
            # A stage that embeds for multi-token prediction alone has no first call.
            self.calls = {} if getattr(module, "pre_process", True) else {"embedding": 1}
            tokens = kwargs.get("input_ids", args[0] if args else None)
            if torch.is_tensor(tokens):
                self.passes.append(("F", *self._at, "tokens", tokens.clone()))

    @property
    def _at(self) -> tuple[int, int]:
        """Microbatch and slice of the call that runs."""
        return divmod(self.unit, self.slices)

    def _end(self, module: Any, args: Any, output: Any) -> None:
        if self.running and getattr(module, "post_process", True):
            self._output("loss", module, args, output)
        self.running = False

    def _output(self, name: str, module: Any, args: Any, output: Any) -> None:
        """A forward hook. Recomputed outputs are not written: they run outside of the chunk."""
        if isinstance(output, tuple):
            output = output[0]
        if not self.running or not torch.is_tensor(output):
            return
        at, calls = self._at, self.calls.get(name, 0) + 1
        self.calls[name] = calls
        name += f", call {calls}" * (calls > 1)  # multi-token prediction has several
        self.passes.append(("F", *at, name, output.detach().clone()))
        if output.requires_grad:
            output.register_hook(
                lambda grad: self.passes.append(("B", *at, name, grad.detach().clone()))
            )


def _value(what: str, piece: Any) -> tuple[Any, ...]:
    """An entry of ``values`` for a sharded tensor."""
    data = piece.data.detach().reshape((1,) * piece.prepend_axis_num + piece.data.shape)
    return what, piece.key, tuple(piece.global_offset), tuple(piece.global_shape), data.clone()


def place() -> dict[str, int]:
    """Sizes and this rank's places in Megatron's groups, and what a pass has of the sequence."""
    from megatron.core import parallel_state as state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "tp_rank": state.get_tensor_model_parallel_rank(),
        "cp": state.get_context_parallel_world_size(),
        "cp_rank": state.get_context_parallel_rank(),
        "dp": state.get_data_parallel_world_size(),
        "dp_rank": state.get_data_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "pp_rank": state.get_pipeline_model_parallel_rank(),
        "ep": state.get_expert_model_parallel_world_size(),
        "ep_rank": state.get_expert_model_parallel_rank(),
        "microbatches": get_num_microbatches(),
        "sequence": get_args().seq_length,
        "sequence_parallel": int(get_args().sequence_parallel),
        "per_token": int(bool(get_args().calculate_per_token_loss)),
    }


def random_states() -> dict[str, torch.Tensor]:
    """The states of all random numbers that checkpoints have."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    found = {
        "Python's random numbers": torch.tensor(random.getstate()[1]),
        "numpy's random numbers": torch.tensor(np.random.get_state()[1].astype(np.int64)),
        "torch's random numbers": torch.get_rng_state(),
    }
    for name, state in get_cuda_rng_tracker().get_states().items():
        if torch.is_tensor(state):
            found[f"the random numbers {name}"] = state.clone()
    return found


def _draw() -> None:
    """Draw from all generators, as dropout and data would."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.random(), np.random.random(), torch.rand(1)
    tracker = get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            torch.rand(1, device="cuda")


def schedule_states(optimizer: Any, scheduler: Any) -> dict[str, torch.Tensor]:
    """Where the schedules of learning rate and weight decay are."""
    groups = [
        [float(group.get(name) or 0) for name in ("lr", "weight_decay")]
        for group in optimizer.param_groups
    ]
    return {
        "steps of the learning-rate schedule": torch.tensor(getattr(scheduler, "num_steps", 0)),
        "learning rate and weight decay": torch.tensor(groups, dtype=torch.float64),
    }


def _alike(optimizer: Any) -> list[Any]:
    """The parameters of which this optimizer's ranks each have a part, in an order that all of
    them share; none for an optimizer that has whole ones."""
    if not hasattr(optimizer, "model_param_group_index_map"):
        return []
    return [p for buffer in optimizer.buffers for p in buffer.params]


def _span(optimizer: Any, parameter: Any) -> slice | None:
    """What this rank has of the flattened parameter."""
    if parameter not in optimizer.model_param_group_index_map:
        return None
    own = optimizer._get_model_param_range_map(parameter)["param"]
    return slice(own.start, own.end)


def _whole(optimizer: Any, parameter: Any, span: slice | None, part: Any) -> torch.Tensor:
    """The parameter's tensor of which each rank gives a ``part``."""
    whole = torch.zeros(parameter.shape, dtype=parameter.main_grad.dtype)
    if span is not None and part is not None:
        whole.view(-1)[span] = part.detach().to(whole.dtype)
    torch.distributed.all_reduce(whole, group=optimizer.data_parallel_group)
    return whole


def _parts(optimizer: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """What the ranks of a distributed optimizer hold together."""
    overlapped = getattr(getattr(optimizer, "ddp_config", None), "overlap_param_gather", False)
    for parameter in _alike(optimizer):
        span = _span(optimizer, parameter)
        own: dict[str, Any] = {}
        if span is not None:
            own = optimizer._get_main_param_and_optimizer_states(parameter)
        for kind in _MOMENTS:
            yield parameter, kind, _whole(optimizer, parameter, span, own.get(kind))
        if overlapped:  # The ranks get each other's parts in the next forward pass only.
            yield parameter, "weight", _whole(optimizer, parameter, span, own.get("param"))
        else:
            yield parameter, "weight", parameter.detach().clone()


def _entries(chunk: Any) -> Iterator[Any]:
    """The sharded tensors, and factories of such, of a chunk's checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.training import get_args
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    metadata = _build_sharded_state_dict_metadata(get_args())
    state = chunk.sharded_state_dict(metadata=metadata)
    for entry in _found(state, (ShardedTensor, ShardedTensorFactory)):
        if torch.is_tensor(entry.data) and entry.data.numel():
            yield entry


def _pieces(entry: Any, tensor: torch.Tensor) -> Iterator[Any]:
    """The sharded tensors that ``entry`` makes of another tensor of its parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if isinstance(entry, ShardedTensor):
        yield dataclasses.replace(entry, data=tensor, dtype=tensor.dtype)
    else:
        yield from _found(dataclasses.replace(entry, data=tensor).build(), (ShardedTensor,))


def _found(state: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """All that is of these ``kinds`` in nested dictionaries and lists."""
    if isinstance(state, kinds):
        yield state
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            yield from _found(one, kinds)
