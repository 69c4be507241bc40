"""Exchange of rows between ranks, chunk by chunk, and the collectives that carry them.

The tokens are routed once, as one batch. Then the batch is cut along its tokens into n chunks, and
each chunk's rows (one for each expert that a token is sent to) travel in all-to-alls of their own:
MPipeMoE, section III. All sizes of all chunks come from one exchange of counts.

Inside a chunk, rows have two orders: as *sent*, by expert, then by token; and as the experts take
them, by local expert, then by the rank that they came from, then by token: the orders that
megatron-core's all-to-all dispatcher has, so that sums come out bit for bit the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

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
    """``rows`` in parts that differ by one at most; empty ones where there are too few."""
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
        counts: rows of (source rank, chunk, local expert), int32 on the device; the source ranks
            in the order (expert tensor parallel, expert parallel).
        worst: over all chunks and ranks.
    """

    experts: int
    chunks: list[Chunk]
    counts: torch.Tensor
    worst: Worst

    @property
    def rows(self) -> int:
        """Rows that this rank's experts work on, in all chunks."""
        return sum(chunk.rows for chunk in self.chunks)


class SentRows(NamedTuple):
    """The rows that this rank sends, on the device: by chunk, then expert, then token.

    Attributes:
        pairs: token * experts + expert of each, int32 (int64 where that is too small).
        places: for each row in the order of tokens, then experts, its place among the rows of its
            chunk, int32.
        starts: of each token's rows among ``places`` of its chunk, (tokens,) int32.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


class Counted(NamedTuple):
    """A routed batch of which all ranks will know how many rows go where.

    Attributes:
        tokens: of this rank.
        chunks: into which it is cut.
        table: rows by (source expert tensor rank, source expert rank, chunk, destination, its
            expert), int32 on the device.
        host: its running copy.
        sent: the rows that this rank sends; behind them as many others as there is room for.
    """

    tokens: int
    chunks: int
    table: torch.Tensor
    host: HostCopy
    sent: SentRows


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

    def count(self, routing_map: torch.Tensor, chunks: int) -> Counted:
        """Sort the rows, and count on all ranks how many go where; one collective, no wait.

        Args:
            routing_map: which token goes to which expert, (tokens, experts) bool.
            chunks: n, the same on every rank of the group.
        """
        blocks = _blocks(routing_map, chunks)
        own = blocks.sum(dim=1, dtype=torch.int32).view(-1)
        ranks = self.ep_size * self.tp_size
        every, work = own, None
        if ranks > 1:
            every = own.new_empty(ranks * own.numel())
            work = dist.all_gather_into_tensor(every, own, group=self.groups.tp_ep, async_op=True)
        # (ep, tp, ...) as the group has them -> (tp, ep, chunk, destination, local expert).
        shape = (self.ep_size, self.tp_size, chunks, self.ep_size, self.local_experts)
        table = every.view(shape).transpose(0, 1)
        rows = _sorted(blocks, len(routing_map))  # while the counts are exchanged
        return Counted(len(routing_map), chunks, table, HostCopy(every, shape, work, own), rows)

    def split(self, counted: Counted) -> tuple[ChunkTable, SentRows]:
        """Cut a routed batch; no collective, but a wait for the counts."""
        chunks, rows, host = counted.chunks, counted.sent, counted.host.wait()
        edges = [0, *accumulate(chunk_rows(counted.tokens, chunks))]
        counts = counted.table[:, :, :, self.ep_rank].reshape(-1, chunks, self.local_experts)
        found = ChunkTable(
            self.experts,
            [self._chunk(host[:, :, i], edges[i], edges[i + 1]) for i in range(chunks)],
            counts,
            _worst(host),
        )
        sent = sum(chunk.sent_rows for chunk in found.chunks)
        pairs, token, places = (part[:sent] for part in rows[:3])
        return found, SentRows(pairs, token, places, rows.starts)

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

    def orders(self, table: ChunkTable) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index of each row that the experts take among the gathered ones, and the other way round.

        Returns:
            Both of all chunks behind each other, (rows of all chunks,) int32, within its chunk;
            None: the orders are the same. Made without a wait of the host.
        """
        if self.local_experts == 1:
            return None
        arriving = table.counts.transpose(0, 1)  # (chunk, source, local expert)
        taken = arriving.transpose(1, 2)
        arrive, take = _starts(arriving), _starts(taken).transpose(1, 2)
        # The block (source, expert) starts at ``arrive`` in one order and at ``take`` in the other.
        every = table.rows
        places = torch.arange(every, dtype=torch.int32, device=arriving.device)
        firsts = arriving.sum(dim=(1, 2), dtype=torch.int32)
        firsts = (firsts.cumsum(0, dtype=torch.int32) - firsts).view(-1, 1, 1)

        def moved(shift: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            blocks = (shift - firsts).reshape(-1)
            return blocks.repeat_interleave(sizes.reshape(-1), output_size=every).add_(places)

        shift = arrive - take
        return moved(shift.transpose(1, 2), taken), moved(-shift, arriving)


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


class HostCopy:
    """A table on its way to the host: on a GPU beside what is computed.

    Args:
        table: on the device. shape: of the copy, of which the first two axes are exchanged.
        work: the collective that fills the table; None: it is full.
        source: what the collective reads. PyTorch lets go of it when the side stream waits, and its
            memory would be used again by the stream that made it, which has not waited yet.
    """

    def __init__(
        self, table: torch.Tensor, shape: tuple[int, ...], work: Any, source: torch.Tensor
    ) -> None:
        self._host, self._shape, self._work = table, shape, work
        self._source: torch.Tensor | None = source
        self._event: Any = None
        if table.is_cuda:
            side = _side_stream(table.device)
            side.wait_stream(torch.cuda.current_stream(table.device))
            with torch.cuda.stream(side):
                if work is not None:
                    work.wait()  # the side stream waits
                self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
                self._host.copy_(table, non_blocking=True)
                table.record_stream(side)
                self._event = side.record_event()

    def wait(self) -> torch.Tensor:
        """The copy, int64; the host waits, and the current stream for the table."""
        if self._work is not None:
            self._work.wait()
        self._work = self._source = None
        if self._event is not None:
            self._event.synchronize()
        return self._host.view(self._shape).transpose(0, 1).long()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _blocks(routing_map: torch.Tensor, parts: int) -> torch.Tensor:
    """(parts, tokens of the longest, experts): the tokens of each part, behind them ones that are
    sent nowhere where it is shorter."""
    tokens, experts = routing_map.shape
    if tokens % parts == 0:
        return routing_map.view(parts, tokens // parts, experts)
    edges = torch.arange(parts + 1, device=routing_map.device) * tokens // parts
    index = edges[:-1, None] + torch.arange(-(-tokens // parts), device=routing_map.device)
    index = torch.where(index < edges[1:, None], index, tokens)
    padded = torch.cat([routing_map, routing_map.new_zeros(1, experts)])
    return padded[index]


def _sorted(blocks: torch.Tensor, tokens: int) -> SentRows:
    """The rows of a batch in all chunks at once; how many they are only the device knows.

    A running count of what is sent, in one order and in the other, gives every row its place.

    Args:
        blocks: as ``_blocks`` gives them. tokens: of the batch.
    """
    chunks, length, experts = blocks.shape
    end = tokens * experts  # where what is not sent goes
    by_expert = blocks.transpose(1, 2).reshape(-1)
    # Of all chunks at once: a running count of few long rows is slow on a GPU.
    place = by_expert.cumsum(0)
    own = blocks.sum(2, dtype=torch.int32)
    sent = own.sum(1)
    before = (sent.cumsum(0) - sent).view(-1, 1, 1)
    edges = torch.arange(chunks, device=blocks.device).view(-1, 1, 1) * tokens // chunks
    token = edges + torch.arange(length, device=blocks.device)
    index = token * experts + torch.arange(experts, device=blocks.device).view(-1, 1)
    kind = torch.int32 if end < 1 << 31 else torch.int64

    def scattered(to: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        target = torch.where(chosen, to - 1, end).view(-1)
        out = torch.empty(end + 1, dtype=values.dtype, device=blocks.device)
        return out.scatter_(0, target, values.reshape(-1))

    by_token = blocks.reshape(-1)
    starts = own.cumsum(1, dtype=torch.int32) - own
    places = place.view(chunks, experts, length) - (before + 1)
    places = places.to(torch.int32).transpose(1, 2)
    pairs = scattered(place, by_expert, index.to(kind))
    return SentRows(
        pairs, pairs // experts, scattered(by_token.cumsum(0), by_token, places), starts
    )


def sum_rows(rows: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """For each token the sum of its rows, one after the other, in fp32 or wider, by one kernel.

    Nothing is added by several threads, so the order of summands is always the same one; it is
    that of megatron-core's sum on CPU tensors, by expert.

    Args:
        rows: (rows, width); they may be strided.
        places: of the tokens' rows, token by token. starts: of each token's among them.

    Returns:
        (tokens, width) of the dtype of ``rows``.
    """
    # On a CPU the kernel rounds ties of bf16 up, not to even as every other one.
    wide = rows.float() if rows.dtype is torch.bfloat16 and not rows.is_cuda else rows
    return torch.embedding_bag(wide, places, starts)[0].to(rows.dtype)


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    """Where blocks of these sizes (n, ...) start, one behind the other in each of n rows."""
    flat = sizes.reshape(len(sizes), -1)
    return (flat.cumsum(1, dtype=torch.int32) - flat).view(sizes.shape)


def _worst(host: torch.Tensor) -> Worst:
    """``host``: (tp, ep, chunk, destination, local expert)."""
    sent = host.sum(dim=(3, 4))
    received = host.sum(dim=(1, 4))
    return Worst(int(sent.max()), int(received.max()), int(received.sum(dim=0).max()))
