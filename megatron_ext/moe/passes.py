"""The forward and the backward pass of one call: the steps of its plan, chunk by chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from .buffers import INPUT, INSIDE, Record, Ring
from .exchange import (
    Chunk,
    ChunkTable,
    Exchange,
    Row,
    SentRows,
    Transfer,
    aligned,
    select_rows,
    sum_rows,
)
from .graph import GradientSums, Graph, Recomputation
from .plan import DEPTH, LayerPlan, Restore, Step, Strategy

if TYPE_CHECKING:
    from .region import Region


@dataclass
class ChunkState:
    """One chunk between its forward and its backward pass.

    Attributes:
        record: what is kept of the experts' input and intermediate tensors.
        again: what fills it, where something is computed again.
        slot: their input, where that is kept.
    """

    record: Record | None = None
    graph: Graph | None = None
    again: Recomputation | None = None
    slot: torch.Tensor | None = None


class RowTable:
    """Where the rows of a call's chunks go.

    Args:
        sent: the rows that this rank sends, see ``Exchange.split``.
        orders: see ``Exchange.orders``; None: not made yet.
        probs: of the rows sent, where they are sent again.
    """

    def __init__(
        self,
        table: ChunkTable,
        sent: SentRows,
        orders: Sequence[torch.Tensor | None] | None = None,
        probs: torch.Tensor | None = None,
    ) -> None:
        self._table, self.sent, self._orders, self.probs = table, sent, orders, probs
        self._starts = [0, *accumulate(chunk.sent_rows for chunk in table.chunks)]
        self._taken = [0, *accumulate(chunk.rows for chunk in table.chunks)]

    def rows_of(self, i: int) -> slice:
        """Those that chunk ``i`` sends."""
        return slice(*self._starts[i : i + 2])

    def order(self, i: int, exchange: Exchange, inverse: bool = False) -> torch.Tensor | None:
        """From the gathered rows of chunk ``i`` to the experts'; None: it is the same."""
        if self._orders is None:
            self._orders = exchange.orders(self._table) or (None, None)
        found = self._orders[inverse]
        return None if found is None else found[slice(*self._taken[i : i + 2])]

    def sum(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Of the returned rows of chunk ``i``, for each of its tokens."""
        chunk = self._table.chunks[i]
        starts = self.sent.starts[i, : chunk.end - chunk.start]
        return sum_rows(rows, self.sent.places[self.rows_of(i)], starts)

    def saved(self) -> list[torch.Tensor | None]:
        """For autograd to keep; forward has made the orders."""
        pairs, _, places, starts = self.sent  # with room for any number of rows
        return [pairs.clone(), places.clone(), starts, self.probs, *(self._orders or (None, None))]

    @classmethod
    def of(cls, table: ChunkTable, saved: Sequence[Any]) -> RowTable:
        """Reverse of ``saved``."""
        pairs, places, starts, probs, *orders = saved[:6]
        return cls(table, SentRows(pairs, pairs // table.experts, places, starts), orders, probs)


class Call:
    """One call of a region, from forward to backward.

    Args:
        table, sent: the chunks, and the rows that this rank sends, see ``Exchange.split``.
        trained: the experts' parameters that want gradients; None: no backward pass will come.
        hidden: (tokens, width). probs: (tokens, experts).
    """

    def __init__(
        self,
        region: Region,
        plan: LayerPlan,
        table: ChunkTable,
        sent: SentRows,
        trained: list[torch.nn.Parameter] | None,
        hidden: torch.Tensor,
        probs: torch.Tensor,
    ) -> None:
        self.region, self.plan, self.table = region, plan, table
        self.states = [ChunkState() for _ in table.chunks]
        self.rows: RowTable | None = RowTable(table, sent)
        self.saves, self.trained = trained is not None, trained or []
        # Without a backward pass there is nothing to restore, so nothing has to stay anywhere.
        self.strategy = plan.strategy if self.saves else Strategy.S4
        self.hidden_field, self.probs_field = (hidden.shape[1], hidden.dtype), (1, probs.dtype)
        self.row = Row(self.hidden_field, self.probs_field)

    @property
    def resends(self) -> bool:
        """True where backward sends the layer's input to the experts again."""
        return self.saves and self.plan.strategy.input is Restore.RESEND

    def take_saved(self, hidden: torch.Tensor) -> list[torch.Tensor | None]:
        """What autograd has to keep, and hand back to ``give_saved``."""
        assert self.rows is not None
        rows, self.rows = self.rows, None
        return [*rows.saved(), hidden if self.resends else None]

    def give_saved(self, saved: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The layer's input, where backward sends it again.

        Raises:
            RuntimeError: backward has run.
        """
        if not self.states:
            raise RuntimeError("an MoE layer in chunks cannot run its backward pass twice")
        self.rows = RowTable.of(self.table, saved)
        return saved[-1]

    @property
    def sent(self) -> RowTable:
        """Where rows go, while a pass runs."""
        assert self.rows is not None
        return self.rows

    @property
    def back_row(self) -> Row:
        """What a message to the experts has for each row in backward."""
        fields = [self.hidden_field]
        if self.resends:
            fields += [self.hidden_field, self.probs_field]
        return Row(*fields)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For a pass. After an error compute waits for the copies of its chunks, whose slots others
        will take, and their places on the host are free, whatever still holds the graph. It does
        not wait for messages: a rank that has failed too may never send them."""
        try:
            yield
        except BaseException:
            records = [state.record for state in self.states]
            self.states = []
            for record in filter(None, records):
                record.finish()
            self.region.memory.ring.leave()
            raise

    def has_work(self, i: int) -> bool:
        """Whether the experts are called: for empty chunks only if they would not be called at
        all, since Megatron gathers parameters when a module is first called, on all ranks."""
        chunks = self.table.chunks
        return chunks[i].rows > 0 or (i == 0 and not any(chunk.rows for chunk in chunks))

    def input_bytes(self, rows: int) -> int:
        """Of a slot for the experts' input."""
        width, dtype = self.hidden_field
        return aligned(rows * width * dtype.itemsize) + rows * self.probs_field[1].itemsize

    def halves(self, slot: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and probabilities in a slot for the experts' input."""
        (width, dtype), (_, probs_dtype) = self.hidden_field, self.probs_field
        size = rows * width * dtype.itemsize
        end = aligned(size)
        p = slot[end : end + rows * probs_dtype.itemsize].view(probs_dtype)
        return slot[:size].view(dtype).view(rows, width), p

    def run_experts(self, x: torch.Tensor, chunk: Chunk, p: torch.Tensor) -> torch.Tensor:
        """C: this rank's experts.

        Raises:
            RuntimeError: they change the shape or dtype of their rows.
        """
        y = self.region.experts(x, chunk.tokens_per_expert, p)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise RuntimeError(
                f"the experts made {tuple(y.shape)} {y.dtype} from {tuple(x.shape)} {x.dtype}; "
                "an MoE layer in chunks needs the same"
            )
        return y

    def run_graph(
        self, x: torch.Tensor, p: torch.Tensor, chunk: Chunk
    ) -> tuple[Graph, torch.Tensor]:
        """The same, recorded for a backward pass."""
        graph = Graph(x, p)
        rows, probs = graph.inputs
        return graph, graph.end(self.run_experts(rows, chunk, probs))


class Messages:
    """Carries the rows of one pass to the experts and back, in buffers that layers share.

    Args:
        call: whose chunks.
        there, back: what a message has for each row, to the experts and from them.
    """

    def __init__(self, call: Call, there: Row, back: Row) -> None:
        self._exchange: Exchange = call.region.exchange
        self._ring: Ring = call.region.memory.ring
        self._chunks = call.table.chunks
        self._there, self._back = there, back
        self._dispatched: dict[int, Transfer] = {}
        self._returning: dict[int, Transfer] = {}
        # Room for the worst chunk of any rank in both passes, so that backward grows no buffer.
        worst, ring = call.table.worst, self._ring
        widest = max(there.nbytes, call.back_row.nbytes)
        ring.reserve("send", worst.sent * widest)
        ring.reserve("return", worst.received * call.row.nbytes)
        if self._exchange.ep_size > 1:
            ring.reserve("receive", worst.received * widest)
            ring.reserve("returned", worst.sent * call.row.nbytes)
        if call.strategy.input is not Restore.KEEP:
            ring.reserve(INPUT, call.input_bytes(worst.rows))

    def take(self, purpose: str, i: int, nbytes: int) -> torch.Tensor:
        """The slot of chunk ``i``, 1-D uint8."""
        return self._ring.take(purpose, i % DEPTH, nbytes)[:nbytes]

    def dispatch(self, i: int, fill: Callable[[list[torch.Tensor]], None]) -> None:
        """Start sending chunk ``i`` to the experts; ``fill`` writes the fields of its rows."""
        chunk, row = self._chunks[i], self._there
        send = self.take("send", i, chunk.sent_rows * row.nbytes)
        fill(row.view(send, chunk.sent_rows))
        table = send.view(chunk.sent_rows, row.nbytes)
        out = table
        if self._exchange.ep_size > 1:
            out = self.take("receive", i, chunk.received_rows * row.nbytes).view(-1, row.nbytes)
        self._dispatched[i] = self._exchange.send(out, table, chunk.sent, chunk.received)

    def arrived(self, i: int) -> list[torch.Tensor]:
        """The fields of all rows of chunk ``i``, in the order in which they came."""
        chunk, rows = self._chunks[i], self._dispatched.pop(i).wait()
        return self._there.view(self._exchange.gather(rows, chunk).view(-1), chunk.rows)

    def send_back(self, i: int, fields: Sequence[torch.Tensor], order: torch.Tensor | None) -> None:
        """Start sending the experts' rows of chunk ``i`` back, each field in ``order``."""
        chunk, row, first = self._chunks[i], self._back, fields[0]
        nbytes = chunk.received_rows * row.nbytes
        if len(fields) == 1 and order is None and first.is_contiguous() and first.nbytes == nbytes:
            given = first.view(torch.uint8).view(-1)
        else:
            given = self.take("return", i, nbytes)
            for part, field in zip(fields, row.view(given, chunk.received_rows)):
                select_rows(part, order, field)
        table = given.view(chunk.received_rows, row.nbytes)
        out = table
        if self._exchange.ep_size > 1:
            out = self.take("returned", i, chunk.sent_rows * row.nbytes).view(-1, row.nbytes)
        self._returning[i] = self._exchange.send(out, table, chunk.received, chunk.sent)

    def returned(self, i: int) -> list[torch.Tensor]:
        """The fields of the rows of chunk ``i`` that are back, in the order in which they left."""
        rows = self._returning.pop(i).wait()
        return self._back.view(rows.view(-1), self._chunks[i].sent_rows)


def _reduced(
    call: Call, i: int, fields: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The experts' rows of chunk ``i`` that go back from this rank, and their order in a message:
    under expert tensor parallelism sums over its ranks, which are in that order."""
    exchange = call.region.exchange
    order = call.sent.order(i, exchange, inverse=True)
    if exchange.tp_size == 1:
        return list(fields), order
    wide = torch.promote_types(call.probs_field[1], torch.float32)
    sorted_ = (t if order is None else t.index_select(0, order) for t in fields)
    chunk = call.table.chunks[i]
    return [exchange.reduce(t.contiguous(), chunk, wide) for t in sorted_], None


class Forward:
    """The forward pass of a call.

    Args:
        hidden: (tokens, width). probs: (tokens, experts).
    """

    def __init__(self, call: Call, hidden: torch.Tensor, probs: torch.Tensor) -> None:
        self._call, self._hidden = call, hidden
        self._messages = Messages(call, call.row, Row(call.hidden_field))
        self._sent_probs = probs.reshape(-1).index_select(0, call.sent.sent.pairs)
        call.sent.probs = self._sent_probs if call.resends else None
        self._out = torch.empty_like(hidden)
        self._selection = call.region.selection()

    def run(self) -> torch.Tensor:
        """The layer's output, (tokens, width)."""
        steps = {
            Step.DISPATCH: self._dispatch,
            Step.COMPUTE: self._compute,
            Step.COLLECT: self._collect,
        }
        with self._call.running():
            for step, i in self._call.plan.operations():
                if step in steps:
                    steps[step](i)
        if self._call.saves:
            self._call.region.memory.hold(self._call.table.rows)
        return self._out

    def _dispatch(self, i: int) -> None:
        rows = self._call.sent
        own = rows.rows_of(i)

        def fill(fields: list[torch.Tensor]) -> None:
            torch.index_select(self._hidden, 0, rows.sent.tokens[own], out=fields[0])
            fields[1].copy_(self._sent_probs[own].unsqueeze(1))

        self._messages.dispatch(i, fill)

    def _compute(self, i: int) -> None:
        y = self._experts(i)
        self._messages.send_back(i, *_reduced(self._call, i, [y]))

    def _experts(self, i: int) -> torch.Tensor:
        call, chunk, state = self._call, self._call.table.chunks[i], self._call.states[i]
        memory = call.region.memory
        memory.departures.make_room()
        record = Record(memory, i, call.strategy, self._selection)
        slot = record.input_slot(call.input_bytes(chunk.rows))
        x, p = call.halves(slot, chunk.rows)
        order = call.sent.order(i, call.region.exchange)
        for field, target in zip(self._messages.arrived(i), (x, p.unsqueeze(1))):
            select_rows(field, order, target)
        if call.saves:
            state.record = record
        if not call.has_work(i):
            return x.new_empty((0, x.shape[1]))
        if not call.saves:
            return call.run_experts(x, chunk, p)
        strategy = call.strategy
        if strategy.inside is not Restore.OFFLOAD:
            record.depart(slot)  # its copy may run while the experts compute
        saving = record.saving(slot, call.region.linears)
        with torch.enable_grad(), saving as state.again:
            state.graph, y = call.run_graph(x, p, chunk)
        if state.again is not None and strategy.input is Restore.KEEP:
            state.slot = slot
        if strategy.inside is Restore.OFFLOAD:
            record.depart(slot)
        return y

    def _collect(self, i: int) -> None:
        """Sum the rows of each token of chunk ``i``."""
        chunk = self._call.table.chunks[i]
        (rows,) = self._messages.returned(i)
        self._out[chunk.start : chunk.end] = self._call.sent.sum(i, rows)


class Backward:
    """The backward pass of a call, from its last chunk to its first.

    Args:
        saved: what ``Call.take_saved`` gave.
        grad: of the output, (tokens, width).
    """

    def __init__(self, call: Call, saved: Sequence[torch.Tensor], grad: torch.Tensor) -> None:
        self._call, self._grad, self._hidden = call, grad, call.give_saved(saved)
        self._messages = Messages(call, call.back_row, call.row)
        self._row_bytes = call.hidden_field[0] * call.hidden_field[1].itemsize
        ring = call.region.memory.ring
        ring.reserve("gradient", call.table.worst.rows * self._row_bytes)
        records = [state.record for state in call.states if state.record is not None]
        ring.reserve(INSIDE, max((one.copied_inside_bytes for one in records), default=0))
        self._sums = GradientSums(call.trained)
        self._d_hidden = torch.empty_like(grad)
        self._d_probs = grad.new_zeros((len(grad), call.table.experts), dtype=call.probs_field[1])
        self._store = call.region.store if call.strategy.keeps_products else None
        self._postponing = contextlib.ExitStack()

    def run(self) -> list[torch.Tensor | None]:
        """Gradients of hidden, probs and the trained parameters."""
        steps = {
            Step.FETCH: self._fetch,
            Step.DISPATCH: self._dispatch,
            Step.COMPUTE: self._compute,
            Step.WEIGHTS: self._weights,
            Step.COLLECT: self._collect,
        }
        last, store = self._call.plan.chunks - 1, self._call.region.store
        with self._call.running(), self._postponing:
            if store is not None:
                once = self._store is not None
                self._postponing.enter_context(store.call() if once else store.suspended())
            for step, position in self._call.plan.operations():
                steps[step](last - position)
        self._call.states = []
        self._call.region.memory.hold(-self._call.table.rows)
        return [self._d_hidden, self._d_probs, *self._sums.result(self._postponed)]

    def _record(self, i: int) -> Record:
        record = self._call.states[i].record
        assert record is not None
        return record

    def _fetch(self, i: int) -> None:
        self._record(i).fetch()

    def _dispatch(self, i: int) -> None:
        """The adjoint of R: output gradients go to the experts, with what is to be sent again."""
        rows = self._call.sent
        own = rows.rows_of(i)

        def fill(fields: list[torch.Tensor]) -> None:
            token = rows.sent.tokens[own]
            torch.index_select(self._grad, 0, token, out=fields[0])
            if self._hidden is not None and rows.probs is not None:
                torch.index_select(self._hidden, 0, token, out=fields[1])
                fields[2].copy_(rows.probs[own].unsqueeze(1))

        self._messages.dispatch(i, fill)

    def _compute(self, i: int) -> None:
        dx, dp = self._experts(i)
        self._messages.send_back(i, *_reduced(self._call, i, [dx, dp.unsqueeze(1)]))

    def _experts(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' backward pass: gradients of the rows and of their probabilities."""
        call, chunk, record = self._call, self._call.table.chunks[i], self._record(i)
        size = chunk.rows * self._row_bytes
        if self._store is not None:
            memory = call.region.memory.device.allocate(size)  # the store keeps it until W
        else:
            memory = self._messages.take("gradient", i, size)
        width, dtype = call.hidden_field
        dy = memory.view(dtype).view(chunk.rows, width)
        arrived, order = self._messages.arrived(i), call.sent.order(i, call.region.exchange)
        select_rows(arrived[0], order, dy)
        slot = dy  # where the graph has its input, a slot stands for nothing
        state = call.states[i]
        if call.strategy.input is not Restore.KEEP:
            slot = record.backward_slot()
            x, p = call.halves(slot, chunk.rows)
            for field, target in zip(arrived[1:], (x, p.unsqueeze(1))):
                select_rows(field, order, target)
        elif state.slot is not None:
            slot, state.slot = state.slot, None
        if not call.has_work(i):
            record.finish()
            return dy, dy.new_empty(0, dtype=call.probs_field[1])
        record.begin(slot)
        if state.again is not None:
            state.again.run(lambda: call.run_graph(*call.halves(slot, chunk.rows), chunk), slot)
        graph, state.graph, state.again = state.graph, None, None
        assert graph is not None
        dx, dp, found = graph.run(dy, call.trained)
        pairs = zip(call.trained, found)
        self._sums.add([None if self._postponed(q, g) else g for q, g in pairs])
        record.finish()
        dx = torch.zeros_like(dy) if dx is None else dx
        return dx, dy.new_zeros(chunk.rows, dtype=call.probs_field[1]) if dp is None else dp

    def _weights(self, _: int) -> None:
        """The weight gradients of all chunks, while the last message is on its way."""
        if self._store is not None:
            self._postponing.close()
            self._sums.add(self._store.gradients(self._call.trained))

    def _postponed(self, parameter: torch.nn.Parameter, grad: torch.Tensor | None = None) -> bool:
        return self._store is not None and self._store.takes(parameter, grad)

    def _collect(self, i: int) -> None:
        """Sum the gradients of each token of chunk ``i``."""
        call, chunk = self._call, self._call.table.chunks[i]
        dx, dp = self._messages.returned(i)
        self._d_hidden[chunk.start : chunk.end] = call.sent.sum(i, dx)
        own = call.sent.rows_of(i)
        self._d_probs.view(-1).index_copy_(0, call.sent.sent.pairs[own].long(), dp.reshape(-1))
