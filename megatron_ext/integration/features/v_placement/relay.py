"""Relay of returned values from the rank that computes the loss to the last pipeline rank, where
Megatron logs and trainers collect results."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ....runtime.channel import Channel, Receipt
from ....runtime.edges import DEFAULT, MessageOptions, connected
from ....runtime.watchdog import Watchdog
from ....schedule.placement import Placement
from ...errors import ConfigError
from ...runner import MegatronRunner

# A tensor's class, first byte in the message, dtype, shape, and whether it was in CPU memory.
_Taken = tuple[type, int, torch.dtype, torch.Size, bool]
_SIZE = 8  # bytes of a number


class Relay:
    """Sends what the loss function returned, the token count and multi-token-prediction metrics to
    the last pipeline rank.

    The token count goes by itself, from device to device, because Megatron needs it to finalize
    gradients. The rest is read by the host, which would wait for its device: after that.
    """

    def __init__(self) -> None:
        self._receipt: Receipt | None = None

    def start(
        self,
        placement: Placement,
        group: Any,
        runner: MegatronRunner,
        device: torch.device,
        watchdog: Watchdog,
        options: MessageOptions = DEFAULT,
    ) -> None:
        """Send one iteration's, or post its receive; on all ranks of the pipeline.

        Args:
            runner: has the losses and the token count, or gets the latter.

        Raises:
            ConfigError: the loss function returned what cannot be sent.
        """
        source = placement.rank_of(placement.num_stages - 1)
        target, rank = group.size() - 1, group.rank()
        if source == target or rank not in (source, target):
            return
        # A communicator of its own: the next iteration's messages may be in flight already.
        edges = connected(group, "losses", [(source, target)], device, options, shapes=True)
        count = runner.num_tokens
        tokens = Channel(edges, tuple(count.shape), count.dtype, device)
        rest = Channel(edges, None, torch.uint8, device)
        if rank == source:
            watchdog.waiting(f"for pipeline rank {target} to take the losses", list)
            tokens.send(count, target, 0)
            rest.send(pack((runner.losses, _take_mtp_metrics()), device), target, 1)
            # gloo never delivers a message whose work is dropped, and nothing is delivered by a
            # process that has ended.
            for channel in (tokens, rest):
                channel.finish()
            return
        watchdog.waiting(f"for the losses from pipeline rank {source}", list)
        count.copy_(tokens.receive(source, 0).wait())
        self._receipt = rest.receive(source, 1)
        self._receipt.post()  # The sender waits for no more than this.

    def losses(self) -> list[Any] | None:
        """On the last rank, the losses of the iteration; None on others and where it has them."""
        receipt, self._receipt = self._receipt, None
        if receipt is None:
            return None
        losses, metrics = unpack(receipt.wait())
        _add_mtp_metrics(metrics)
        result: list[Any] = losses
        return result


def pack(value: Any, device: torch.device) -> torch.Tensor:
    """``value`` as one message: the number of bytes of its structure (in 8 bytes), its structure
    pickled, then its tensors' bytes, from device memory.

    Args:
        value: any object that pickles; tensors in it, wherever they lie (in a nested tensor, a
            TensorDict, a dataclass), are taken out of the pickle, once each, without their graph.

    Returns:
        The message (one-dimensional, uint8).

    Raises:
        ConfigError: something in ``value`` does not pickle.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            "under V placement the rank of the loss sends what the loss function returned to the "
            f"last pipeline rank, but it does not pickle ({error}); return tensors, numbers and "
            "objects of classes at the top level of a module"
        ) from None
    pickled = buffer.getvalue()
    begin = bytearray(len(pickled).to_bytes(_SIZE, "little") + pickled)
    skeleton = torch.frombuffer(begin, dtype=torch.uint8).to(device)
    tensors = (t.detach().resolve_conj().resolve_neg().to(device) for t in pickler.tensors)
    parts = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat([skeleton, *parts])


def unpack(data: torch.Tensor) -> Any:
    """The value that ``pack`` made ``data`` of.

    Its tensors have memory of their own, on the message's device; those that were in CPU memory
    are there again (sizes of a nested tensor, for one).
    """
    size = int.from_bytes(data[:_SIZE].cpu().numpy().tobytes(), "little")
    end = _SIZE + size
    structure = io.BytesIO(data[_SIZE:end].cpu().numpy().tobytes())
    return _Unpickler(structure, data[end:]).load()


class _Pickler(pickle.Pickler):
    """Takes plain tensors out of what it pickles; other kinds reduce themselves to plain ones."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._taken: dict[int, _Taken] = {}
        self._bytes = 0

    def persistent_id(self, obj: Any) -> _Taken | None:
        if not isinstance(obj, torch.Tensor) or not _is_plain(obj):
            return None
        if id(obj) not in self._taken:
            # Kept, so that no other tensor gets the same identity before the end.
            self.tensors.append(obj)
            kind = torch.Tensor if isinstance(obj, torch.nn.Parameter) else type(obj)
            self._taken[id(obj)] = (kind, self._bytes, obj.dtype, obj.shape, obj.is_cpu)
            self._bytes += obj.numel() * obj.element_size()
        return self._taken[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Puts tensors back in; for messages between ranks of one job, which trust each other."""

    def __init__(self, file: io.BytesIO, data: torch.Tensor) -> None:
        super().__init__(file)
        self._data = data
        self._made: dict[_Taken, torch.Tensor] = {}

    def persistent_load(self, taken: Any) -> torch.Tensor:
        if taken not in self._made:
            kind, begin, dtype, shape, on_cpu = taken
            end = begin + shape.numel() * dtype.itemsize
            tensor = self._data[begin:end].clone().view(dtype).view(shape).as_subclass(kind)
            self._made[taken] = tensor.cpu() if on_cpu else tensor
        return self._made[taken]


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor is its own memory, not a wrapper of other tensors or another layout."""
    wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    other = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout == torch.strided and not wrapper and not other


def _tracker() -> dict[str, Any]:
    """Where Megatron's multi-token prediction sums up what it will log."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker


def _take_mtp_metrics() -> dict[str, torch.Tensor]:
    """Remove this rank's metrics: a rank that has some takes part in reducing them."""
    tracker = _tracker()
    names = [name for name in tracker if name.endswith("values") and "cumulative" not in name]
    return {name: tracker.pop(name) for name in names}


def _add_mtp_metrics(metrics: dict[str, torch.Tensor]) -> None:
    from megatron.core import parallel_state

    tracker = _tracker()
    for name, values in metrics.items():
        tracker[name] = tracker[name] + values if name in tracker else values
        tracker["reduce_group"] = None
        # Averaged by the last ranks among themselves, as if they had computed them.
        tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
