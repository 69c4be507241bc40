"""Exchange of rows between ranks, chunk by chunk, and the collectives that carry them.

The tokens are routed once, as one batch. Then the batch is cut along its tokens into n chunks, and
each chunk's rows (one for each expert that a token is sent to) travel in all-to-alls of their own:
MPipeMoE, section III. All sizes of all chunks come from one exchange of counts.

Inside a chunk, rows have two orders: as *sent*, by expert, then by token; and as the experts take
them, by local expert, then by the rank that they came from, then by token: the orders that
megatron-core's all-to-all dispatcher has, so that sums come out bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT = 16  # bytes: rows and fields start where kernels can use their widest loads


class Row:
    """One token's bytes in a message: several fields side by side, so that they share a message.

    Args:
        fields: (elements, dtype) of each.
    """

    def __init__(self, *fields: tuple[int, torch.dtype]) -> None:
        self._fields: list[tuple[int, int, torch.dtype]] = []
        end = 0
        for width, dtype in fields:
            self._fields.append((end, width * dtype.itemsize, dtype))
            end = aligned(end + width * dtype.itemsize)
        self.nbytes = end

    def view(self, buffer: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """The fields of ``rows`` rows in ``buffer`` (1-D uint8): each (rows, elements), strided."""
        table = buffer[: rows * self.nbytes].view(rows, self.nbytes)
        return [table[:, at : at + size].view(dtype) for at, size, dtype in self._fields]


def chunk_rows(rows: int, chunks: int) -> list[int]:
    """``rows`` in ``chunks`` parts that differ by one at most; empty ones where there are too few.

    The borders of few parts are among those of many if the one number divides the other.
    """
    return [b - a for a, b in pairwise(rows * k // chunks for k in range(chunks + 1))]


def select_rows(source: torch.Tensor, order: torch.Tensor | None, out: torch.Tensor) -> None:
    """``out[r] = source[order[r]]``; both may be strided."""
    if order is None:
        out.copy_(source)
    else:
        torch.index_select(source, 0, order, out=out)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of fields."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Groups:
    """The process groups of an MoE layer, as megatron-core names them.

    Attributes:
        ep: expert parallel: rank i has the i-th part of the experts.
        tp: expert tensor parallel: each of its ranks has a slice of every expert; None if it is 1.
        tp_ep: both, tensor-parallel ranks beside each other.
    """

    ep: Any
    tp: Any
    tp_ep: Any


@dataclass(frozen=True)
class Chunk:
    """One chunk's rows; all sizes are on the host.

    Attributes:
        start, end: its tokens.
        sent, received: rows to, and from, each expert-parallel rank.
        gathered: rows that each expert-tensor-parallel rank received; they are shared among them.
        tokens_per_expert: rows of each local expert, (local experts,) int64, on the host.
    """

    start: int
    end: int
    sent: list[int]
    received: list[int]
    gathered: list[int]
    tokens_per_expert: torch.Tensor

    @property
    def sent_rows(self) -> int:
        """Rows that this rank sends."""
        return sum(self.sent)

    @property
    def received_rows(self) -> int:
        """Rows that this rank gets by all-to-all."""
        return sum(self.received)

    @property
    def rows(self) -> int:
        """Rows that this rank's experts work on."""
        return sum(self.gathered)


@dataclass(frozen=True)
class Worst:
    """The most rows that any chunk of any rank of the group has: sizes of shared buffers."""

    sent: int
    received: int
    rows: int


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of one routed batch.

    Attributes:
        experts: of the whole layer.
        chunks: in order.
        counts: rows of (source rank, chunk, local expert), int32 on the device; the source ranks
            in the order (expert tensor parallel, expert parallel).
        worst: over all chunks and ranks.
    """

    experts: int
    chunks: list[Chunk]
    counts: torch.Tensor
    worst: Worst


@dataclass(frozen=True)
class Counted:
    """A routed batch of which all ranks know how many rows go where.

    Attributes:
        routing_map: (tokens, experts) bool.
        table: rows by (source expert tensor rank, source expert rank, part of the batch,
            destination, its expert), int32 on the device.
        host: the same on the host, int64.
    """

    routing_map: torch.Tensor
    table: torch.Tensor
    host: torch.Tensor

    @property
    def rows(self) -> int:
        """The most rows that any rank's experts have."""
        return int(self.host.sum(dim=(0, 1, 2, 4)).max())


class Exchange:
    """Cuts one layer's batches into chunks, and carries them.

    Args:
        groups: the layer's process groups.
        experts: number of experts in all, a multiple of the expert-parallel size.
    """

    def __init__(self, groups: Groups, experts: int) -> None:
        self.groups, self.experts = groups, experts
        self.ep_size, self.ep_rank = dist.get_world_size(groups.ep), dist.get_rank(groups.ep)
        tp = groups.tp
        self.tp_size = 1 if tp is None else dist.get_world_size(tp)
        self.tp_rank = 0 if tp is None else dist.get_rank(tp)
        self.local_experts = experts // self.ep_size

    def count(self, routing_map: torch.Tensor, finest: int) -> Counted:
        """Count on all ranks how many rows go where; one collective and one wait of the host.

        Args:
            routing_map: which token goes to which expert, (tokens, experts) bool.
            finest: parts of the batch that are counted, the same on every rank of the group; any
                number that divides it may become the number of chunks.
        """
        parts = routing_map.split(chunk_rows(routing_map.shape[0], finest))
        own = torch.stack([part.sum(dim=0, dtype=torch.int32) for part in parts]).view(-1)
        ranks = self.ep_size * self.tp_size
        every = own
        if ranks > 1:
            every = own.new_empty(ranks * own.numel())
            dist.all_gather_into_tensor(every, own, group=self.groups.tp_ep)
        # (ep, tp, ...) as the group has them -> (tp, ep, part, destination, local expert).
        shape = (self.ep_size, self.tp_size, finest, self.ep_size, self.local_experts)
        host = every.cpu().long()
        return Counted(
            routing_map, every.view(shape).transpose(0, 1), host.view(shape).transpose(0, 1)
        )

    def split(self, counted: Counted, chunks: int) -> tuple[ChunkTable, list[torch.Tensor]]:
        """Cut a routed batch; no collective, no wait.

        Args:
            counted: the batch.
            chunks: n, the same on every rank of the group, a divisor of the parts counted.

        Returns:
            The chunks; and for each, where in its (tokens, experts) matrix each sent row has its
            probability: token * experts + expert, (sent rows,) int32 (int64 where that is too
            small).
        """
        sizes = chunk_rows(counted.routing_map.shape[0], chunks)
        parts = counted.routing_map.split(sizes)
        edges = [0, *accumulate(sizes)]
        # Borders of few parts are among those of many.
        table, host = (
            t.unflatten(2, (chunks, -1)).sum(3, dtype=t.dtype)
            for t in (counted.table, counted.host)
        )
        own_rows = host[self.tp_rank, self.ep_rank].sum(dim=(1, 2)).tolist()
        counts = table[:, :, :, self.ep_rank].reshape(-1, chunks, self.local_experts)
        found = ChunkTable(
            self.experts,
            [self._chunk(host[:, :, i], edges[i], edges[i + 1]) for i in range(chunks)],
            counts.contiguous(),
            _worst(host),
        )
        return found, [_sent_order(part, rows) for part, rows in zip(parts, own_rows)]

    def _chunk(self, table: torch.Tensor, start: int, end: int) -> Chunk:
        """``table``: (tp, ep, destination, local expert) of one chunk, on the host."""
        here = table[:, :, self.ep_rank]
        return Chunk(
            start,
            end,
            sent=table[self.tp_rank, self.ep_rank].sum(dim=1).tolist(),
            received=here[self.tp_rank].sum(dim=1).tolist(),
            gathered=here.sum(dim=(1, 2)).tolist(),
            tokens_per_expert=here.sum(dim=(0, 1)),
        )

    # --- what travels ---

    def send(
        self, out: torch.Tensor, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Transfer:
        """Start an all-to-all among the expert-parallel ranks.

        Args:
            out: (sum of ``received``, ...), contiguous; not used where there is one rank.
            rows: (sum of ``sent``, ...), contiguous; must stay as it is until the end.
            sent, received: rows to and from each rank.
        """
        if self.ep_size == 1:
            return Transfer(rows, rows, None)
        work = dist.all_to_all_single(
            out, rows, list(received), list(sent), group=self.groups.ep, async_op=True
        )
        return Transfer(out, rows, work)

    def gather(self, rows: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """All rows that the expert-tensor-parallel ranks received: (``chunk.rows``, ...).

        An all-to-all, because gathering does not take uneven sizes on every backend.
        """
        if self.tp_size == 1:
            return rows
        every = rows.repeat(self.tp_size, *(1 for _ in rows.shape[1:]))
        out = rows.new_empty((chunk.rows, *rows.shape[1:]))
        own = [chunk.received_rows] * self.tp_size
        dist.all_to_all_single(out, every, chunk.gathered, own, group=self.groups.tp)
        return out

    def reduce(self, rows: torch.Tensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The adjoint of ``gather``: this rank's rows, summed over the group in ``dtype``.

        Args:
            rows: (``chunk.rows``, width), contiguous.

        Returns:
            (``chunk.received_rows``, width) of the dtype that ``rows`` has.
        """
        if self.tp_size == 1:
            return rows
        own = chunk.received_rows
        parts = rows.new_empty((self.tp_size * own, *rows.shape[1:]))
        dist.all_to_all_single(
            parts, rows, [own] * self.tp_size, chunk.gathered, group=self.groups.tp
        )
        # An explicit order: the same on every backend.
        first, *others = parts.to(dtype).chunk(self.tp_size) if own else [parts]
        for other in others:
            first = first + other
        return first.to(rows.dtype)

    def order(self, table: ChunkTable, number: int, inverse: bool = False) -> torch.Tensor | None:
        """Index of each row that the experts take among the gathered ones; None: the same order.

        Args:
            table, number: of the chunk.
            inverse: the other way round.

        Returns:
            (``chunk.rows``,) int64, made without a wait of the host.
        """
        if self.local_experts == 1:
            return None
        by_source = table.counts[:, number].long()
        by_expert = by_source.t()
        arrive, take = _starts(by_source), _starts(by_expert).t()
        # The block (source, expert) starts at ``arrive`` in one order and at ``take`` in the other.
        shift, sizes = (take - arrive, by_source) if inverse else ((arrive - take).t(), by_expert)
        rows = table.chunks[number].rows
        moved = torch.repeat_interleave(shift.reshape(-1), sizes.reshape(-1), output_size=rows)
        return moved + torch.arange(rows, device=moved.device)


class Transfer:
    """Rows on their way. Holds what the collective reads and writes until it is over."""

    def __init__(self, out: torch.Tensor, rows: torch.Tensor, work: Any) -> None:
        self._out, self._rows, self._work = out, rows, work

    def wait(self) -> torch.Tensor:
        """The rows that arrived. On a GPU it is the current stream that waits, not the host."""
        if self._work is not None:
            self._work.wait()
        out = self._out
        del self._out, self._rows, self._work
        return out


def _sent_order(routing_map: torch.Tensor, rows: int) -> torch.Tensor:
    """token * experts + expert of each routed pair, by expert, then by token; no host wait."""
    tokens, experts = routing_map.shape
    small = tokens * experts < 1 << 31
    if not tokens:
        return torch.empty(0, dtype=torch.int32, device=routing_map.device)
    flat = routing_map.t().reshape(-1)
    if flat.is_cuda:
        flat = flat.to(torch.uint8).argsort(descending=True, stable=True)[:rows]
    else:
        flat = flat.nonzero().view(-1)
    index = flat % tokens * experts + flat // tokens
    return index.to(torch.int32 if small else torch.int64)


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    """Where blocks of these sizes start, one behind the other, in the shape of ``sizes``."""
    flat = sizes.reshape(-1)
    return (flat.cumsum(0) - flat).view(sizes.shape)


def _worst(host: torch.Tensor) -> Worst:
    """``host``: (tp, ep, chunk, destination, local expert)."""
    sent = host.sum(dim=(3, 4))
    received = host.sum(dim=(1, 4))
    return Worst(int(sent.max()), int(received.max()), int(received.sum(dim=0).max()))
