"""dispatch -> experts -> combine of an MoE layer, in chunks that overlap, as one autograd function.

Forward, chunk by chunk: S (dispatch) of the next chunk is on its way while this one's experts
compute, and R (combine) of the one before comes back. Collectives leave in the order S0 S1 R0 S2
R1 ..., the same on every rank (MPipeMoE, section III-B). Backward is the mirror image, last chunk
first.

The parameters of the experts are inputs of the function. So however many chunks there are, autograd
sees one gradient a parameter and call, and whoever waits for gradients (Megatron's data parallel
reduction) is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from .exchange import Chunk, Exchange, Plan, Row, Transfer, aligned, select_rows
from .graph import GradientSums, Graph
from .ring import DEPTH
from .saved import INPUT, Memory, Record, entered
from .settings import Decides, Way
from .strategies import Restore, Strategy
from .watch import DeviceWatch

# (x (rows, width), rows of each local expert on the host, probabilities (rows,)) -> (rows, width)
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Postponing(Protocol):
    """A store that may take over the experts' weight gradients while their backward pass runs."""

    @property
    def collecting(self) -> bool:
        """True if it does now."""

    def suspended(self) -> AbstractContextManager[None]:
        """Inside, it does not."""

    def in_parts(self) -> AbstractContextManager[None]:
        """Inside, what it takes are parts of gradients, one part a chunk."""

    def takes(self, parameter: Any, grad: torch.Tensor | None) -> bool:
        """True if the gradient of ``parameter`` is its business: it will compute what is missing
        from ``grad``, which is what a chunk gave or None, and add ``grad`` if that is real."""


class Region:
    """The region of one layer.

    Args:
        exchange: the layer's collectives.
        experts: computes with this rank's experts.
        parameters: theirs, all that may require gradients.
        memory: shared with the rank's other layers.
        store: may compute the experts' weight gradients later. It is let to where nothing is
            restored; otherwise the rows that it would need lie in buffers that the next chunk
            takes, and weight gradients are computed in the backward pass itself.
    """

    def __init__(
        self,
        exchange: Exchange,
        experts: Experts,
        parameters: Sequence[torch.nn.Parameter],
        memory: Memory,
        store: Postponing | None = None,
    ) -> None:
        self.exchange, self.experts, self.memory = exchange, experts, memory
        self.parameters, self.store = list(parameters), store

    def __call__(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        decides: Decides,
    ) -> torch.Tensor:
        """Dispatch, compute and combine.

        Args:
            hidden: (tokens, width).
            probs: of each token for each expert, (tokens, experts).
            routing_map: which of them count, likewise, bool.
            decides: how, the same on every rank of the layer's groups; there may be more chunks
                than tokens.

        Returns:
            (tokens, width): for each token the sum over its experts.

        Raises:
            ValueError: shapes that do not go together.
        """
        wanted = (hidden.shape[0], self.exchange.experts)
        if hidden.dim() != 2 or probs.shape != wanted or routing_map.shape != wanted:
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, probs {tuple(probs.shape)} and routing map "
                f"{tuple(routing_map.shape)} do not go together: the latter two must be {wanted}"
            )
        trained = [p for p in self.parameters if p.requires_grad]
        inputs = (hidden, probs, *trained)
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        watch = None
        with torch.no_grad():
            counted = self.exchange.count(routing_map, decides.finest, decides.outgoing())
            way = decides.decide(counted.rows, counted.notes, saves)
            if way.trial is not None and saves:
                watch = DeviceWatch(hidden.device)
            plan = self.exchange.plan(counted, way.chunks)
        call = _Call(self, plan, way, trained if saves else None, watch)
        result: torch.Tensor = _Function.apply(call, *inputs)
        return result


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call.timed(call.forward, inputs[0].detach(), inputs[1].detach())
        if call.saves:
            ctx.call = call
            ctx.save_for_backward(*call.take_saved(inputs[0]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradients = ctx.call.timed(ctx.call.backward, ctx.saved_tensors, grad)
        ctx.call.tell()
        return (None, *gradients)


class _Call:
    """One call of a region, from forward to backward."""

    def __init__(
        self,
        region: Region,
        plan: Plan,
        way: Way,
        trained: list[torch.nn.Parameter] | None,
        watch: DeviceWatch | None,
    ) -> None:
        self._watch = watch
        self._region, self._exchange, self._memory = region, region.exchange, region.memory
        self._plan, self._strategy, self._trial = plan, way.strategy, way.trial
        self._ahead = min(way.ahead, way.chunks)
        self._depth = max(self._ahead, DEPTH)
        self._index = list(plan.index)
        plan.index.clear()
        self.saves, self._trained = trained is not None, trained or []
        self._records: list[Record] = []
        self._graphs: dict[int, Graph] = {}
        self._sent_probs: list[torch.Tensor] = []
        self._resends = way.strategy.input is Restore.RESEND
        # Under no_grad there is nothing to restore, so nothing has to stay anywhere.
        self._effective = way.strategy if self.saves else Strategy.S4
        self._transfers: dict[int, Transfer] = {}
        self._residents: set[int] = set()
        weighs = way.trial is not None and way.trial.weighs
        if self.saves and (way.strategy.inside is Restore.OFFLOAD or weighs):
            self._residents = self._memory.know(region.parameters)

    def timed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a pass, between two points of the watch if there is one."""
        if self._watch is None:
            return function(*args)
        self._watch.point()
        result = function(*args)
        self._watch.point()
        return result

    def tell(self) -> None:
        """Forward and backward are over."""
        if self._watch is not None and self._trial is not None:
            self._trial.timed(self._watch)

    # --- forward ---

    def forward(self, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """The layer's output, (tokens, width)."""
        self._hidden: torch.Tensor | None = hidden
        self._probs = probs
        self._width, self._dtype, self._probs_dtype = hidden.shape[1], hidden.dtype, probs.dtype
        self._row = self._back_row = Row((self._width, self._dtype), (1, self._probs_dtype))
        self._reserve(self._row)
        out = torch.zeros_like(hidden)
        count = len(self._plan.chunks)
        returning: dict[int, Transfer] = {}
        late = self._ahead - 1
        for i in range(min(late, count)):
            self._dispatch(i)
        for i in range(count):
            if i + late < count:
                self._dispatch(i + late)
            returning[i] = self._return(i, self._compute(i))
            # Not before: compute would wait for a message that left after the next chunk's.
            if i >= late:
                self._add_up(i - late, returning.pop(i - late).wait(), out)
        for i in sorted(returning):
            self._add_up(i, returning.pop(i).wait(), out)
        self._hidden = None
        del self._probs
        return out

    def take_saved(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What autograd has to keep, and hand back to ``backward``."""
        own = [*self._index, *self._sent_probs]
        if self._trial is not None and self._trial.weighs:
            kept = sum(record.kept_bytes for record in self._records)
            kept += sum(t.numel() * t.element_size() for t in own)
            self._trial.weighed(kept, sum(chunk.rows for chunk in self._plan.chunks))
        saved = [*self._index, *([hidden, *self._sent_probs] if self._resends else [])]
        self._index, self._sent_probs = [], []
        return saved

    def _dispatch(self, i: int) -> None:
        chunk, index = self._plan.chunks[i], self._index[i]
        assert self._hidden is not None
        hidden, probs = (t[chunk.start : chunk.end] for t in (self._hidden, self._probs))
        send = self._send_buffer(i, self._row)
        rows, row_probs = self._row.view(send, chunk.sent_rows)
        torch.index_select(hidden, 0, self._tokens(index), out=rows)
        own_probs = probs.reshape(-1).index_select(0, index)
        row_probs.copy_(own_probs.unsqueeze(1))
        if self._resends and self.saves:
            self._sent_probs.append(own_probs)
        self._transfers[i] = self._post(i, self._row, send)

    def _compute(self, i: int) -> torch.Tensor:
        """C: this rank's experts on the rows that have arrived."""
        chunk = self._plan.chunks[i]
        self._memory.departures.make_room()
        record = Record(self._memory, i, self._effective, self._depth)
        if self.saves:
            self._records.append(record)
        slot = record.input_slot(self._input_bytes(chunk.rows))
        x, p = self._fill(i, slot, self._row.view(self._arrived(i, self._row), chunk.rows))
        if not self._has_work(i):
            return x.new_empty((0, self._width))
        weighs = self._trial is not None and self._trial.weighs
        if not (self.saves and self._strategy.keeps_graph):
            if self.saves:
                record.leave(slot)  # its copy may run while the experts compute
            y = self._experts(x, chunk, p)
        else:
            with entered(torch.enable_grad(), record.saving(slot, self._residents, weighs)):
                self._graphs[i], y = self._graph(x, chunk, p)
            record.leave(slot)
        return y

    def _graph(self, x: torch.Tensor, chunk: Chunk, p: torch.Tensor) -> tuple[Graph, torch.Tensor]:
        graph = Graph(x, p)
        rows, probs = graph.inputs
        return graph, graph.end(self._experts(rows, chunk, probs))

    def _experts(self, x: torch.Tensor, chunk: Chunk, p: torch.Tensor) -> torch.Tensor:
        y = self._region.experts(x, chunk.tokens_per_expert, p)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise RuntimeError(
                f"the experts made {tuple(y.shape)} {y.dtype} from {tuple(x.shape)} {x.dtype}; "
                "an MoE layer in chunks needs the same"
            )
        return y

    def _return(self, i: int, y: torch.Tensor) -> Transfer:
        """R: the experts' rows go back to where they came from."""
        chunk, exchange = self._plan.chunks[i], self._exchange
        row = Row((self._width, self._dtype))
        order = exchange.order(self._plan, i, inverse=True)
        if exchange.tp_size > 1:
            y = y if order is None else y.index_select(0, order)
            wide = torch.promote_types(self._probs_dtype, torch.float32)
            y, order = exchange.reduce(y.contiguous(), chunk, wide), None
        if order is None and y.is_contiguous() and row.nbytes == self._width * y.itemsize:
            return self._post_back(i, row, y.view(torch.uint8).view(-1))
        back = self._take("return", i, chunk.received_rows * row.nbytes)
        select_rows(y, order, row.view(back, chunk.received_rows)[0])
        return self._post_back(i, row, back)

    def _add_up(self, i: int, arrived: torch.Tensor, out: torch.Tensor) -> None:
        """Sum the rows of each token of chunk ``i`` into ``out``."""
        chunk = self._plan.chunks[i]
        (rows,) = Row((self._width, self._dtype)).view(arrived.view(-1), chunk.sent_rows)
        token = self._tokens(self._index[i]).long()
        part = out[chunk.start : chunk.end]
        # As megatron-core does it, so that sums of many have its order.
        if torch.are_deterministic_algorithms_enabled():
            part.index_add_(0, token, rows)
        else:
            part.scatter_add_(0, token.unsqueeze(1).expand(-1, self._width), rows)

    # --- backward ---

    def backward(self, saved: Sequence[torch.Tensor], grad: torch.Tensor) -> list[Any]:
        """Gradients of hidden, probs and the trained parameters."""
        if not self._records:
            raise RuntimeError("an MoE layer in chunks cannot run its backward pass twice")
        count = len(self._plan.chunks)
        self._index, rest = list(saved[:count]), saved[count:]
        if self._resends:
            self._hidden, self._sent_probs = rest[0], list(rest[1:])
        self._grad = grad
        fields = [(self._width, self._dtype)]
        if self._resends:
            fields += [(self._width, self._dtype), (1, self._probs_dtype)]
        self._back_row = Row(*fields)
        self._reserve(self._back_row)
        size = self._plan.worst.rows * self._width * self._dtype.itemsize
        self._memory.ring.reserve("gradient", size)
        sums = GradientSums(self._trained)
        d_hidden = torch.zeros_like(grad)
        d_probs = grad.new_zeros((len(grad), self._plan.experts), dtype=self._probs_dtype)
        returning: dict[int, Transfer] = {}
        late = self._ahead - 1
        self._records[-1].prefetch()
        for i in range(count - 1, max(count - 1 - late, -1), -1):
            self._start_backward(i)
        for i in reversed(range(count)):
            if i:
                self._records[i - 1].prefetch()
            if i - late >= 0:
                self._start_backward(i - late)
            returning[i] = self._return_gradients(i, *self._compute_backward(i, sums))
            if i + late < count:
                self._add_up_gradients(i + late, returning.pop(i + late).wait(), d_hidden, d_probs)
        for i in sorted(returning, reverse=True):
            self._add_up_gradients(i, returning.pop(i).wait(), d_hidden, d_probs)
        self._index, self._records, self._sent_probs = [], [], []
        self._hidden = None
        del self._grad
        return [d_hidden, d_probs, *sums.result(self._taken)]

    def _start_backward(self, i: int) -> None:
        """The adjoint of R: output gradients go to the experts, with what is to be sent again."""
        chunk, index, row = self._plan.chunks[i], self._index[i], self._back_row
        token = self._tokens(index)
        send = self._send_buffer(i, row)
        fields = row.view(send, chunk.sent_rows)
        torch.index_select(self._grad[chunk.start : chunk.end], 0, token, out=fields[0])
        if self._hidden is not None:
            torch.index_select(self._hidden[chunk.start : chunk.end], 0, token, out=fields[1])
            fields[2].copy_(self._sent_probs[i].unsqueeze(1))
        self._transfers[i] = self._post(i, row, send)

    def _compute_backward(self, i: int, sums: GradientSums) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' backward pass: gradients of the rows and of their probabilities."""
        chunk, record = self._plan.chunks[i], self._records[i]
        fields = self._back_row.view(self._arrived(i, self._back_row), chunk.rows)
        size = chunk.rows * self._width * self._dtype.itemsize
        if self._postpones:
            dy = self._memory.device.allocate(size)  # the store keeps it until W
        else:
            dy = self._take("gradient", i, size)[:size]
        dy = dy.view(self._dtype).view(chunk.rows, self._width)
        order = self._exchange.order(self._plan, i)
        select_rows(fields[0], order, dy)
        if self._strategy.input is Restore.KEEP:
            slot = dy  # stands for nothing: the graph has its input
        else:
            slot = record.restored_slot()
            x, p = self._halves(slot, chunk)
            if self._resends:
                select_rows(fields[1], order, x)
                select_rows(fields[2], order, p.unsqueeze(1))
        if not self._has_work(i):
            record.finish()
            return dy, dy.new_empty(0, dtype=self._probs_dtype)
        record.use(slot)
        graph = self._graphs.pop(i, None)
        if graph is None:
            with torch.enable_grad():
                graph, _ = self._graph(x, chunk, p)
        with self._passing_on():
            dx, dp, found = graph.run(dy, self._trained)
        sums.add([None if self._taken(p, g) else g for p, g in zip(self._trained, found)])
        record.finish()
        dx = torch.zeros_like(dy) if dx is None else dx
        return dx, dy.new_zeros(chunk.rows, dtype=self._probs_dtype) if dp is None else dp

    @property
    def _postpones(self) -> bool:
        store = self._region.store
        return store is not None and store.collecting and self._strategy is Strategy.NONE

    def _passing_on(self) -> AbstractContextManager[None]:
        store = self._region.store
        if store is None:
            return nullcontext()
        return store.in_parts() if self._postpones else store.suspended()

    def _taken(self, parameter: torch.nn.Parameter, grad: torch.Tensor | None = None) -> bool:
        store = self._region.store
        return self._postpones and store is not None and store.takes(parameter, grad)

    def _return_gradients(self, i: int, dx: torch.Tensor, dp: torch.Tensor) -> Transfer:
        """The adjoint of S."""
        chunk, exchange, dp = self._plan.chunks[i], self._exchange, dp.unsqueeze(1)
        order = exchange.order(self._plan, i, inverse=True)
        if exchange.tp_size > 1:
            wide = torch.promote_types(self._probs_dtype, torch.float32)
            dx, dp = (t if order is None else t.index_select(0, order) for t in (dx, dp))
            dx, dp = (exchange.reduce(t.contiguous(), chunk, wide) for t in (dx, dp))
            order = None
        back = self._take("return", i, chunk.received_rows * self._row.nbytes)
        for part, field in zip((dx, dp), self._row.view(back, chunk.received_rows)):
            select_rows(part, order, field)
        return self._post_back(i, self._row, back)

    def _add_up_gradients(
        self, i: int, arrived: torch.Tensor, d_hidden: torch.Tensor, d_probs: torch.Tensor
    ) -> None:
        chunk, index = self._plan.chunks[i], self._index[i]
        dx, dp = self._row.view(arrived.view(-1), chunk.sent_rows)
        d_hidden[chunk.start : chunk.end].index_add_(0, self._tokens(index), dx)
        part = d_probs[chunk.start : chunk.end].view(-1)
        part.index_copy_(0, index.long(), dp.reshape(-1))

    # --- messages and memory ---

    def _reserve(self, row: Row) -> None:
        """Let the shared buffers have room for the worst chunk of any rank.

        Args:
            row: of what goes to the experts.
        """
        worst, ring = self._plan.worst, self._memory.ring
        ring.reserve("send", worst.sent * row.nbytes)
        ring.reserve("return", worst.received * self._row.nbytes)
        if self._exchange.ep_size > 1:
            ring.reserve("receive", worst.received * row.nbytes)
            ring.reserve("returned", worst.sent * self._row.nbytes)
        if self._effective.input is not Restore.KEEP:
            ring.reserve(INPUT, self._input_bytes(worst.rows))

    def _input_bytes(self, rows: int) -> int:
        wide = aligned(rows * self._width * self._dtype.itemsize)
        return wide + rows * self._probs_dtype.itemsize

    def _halves(self, slot: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and probabilities in a slot for the experts' input."""
        size = chunk.rows * self._width * self._dtype.itemsize
        x = slot[:size].view(self._dtype).view(chunk.rows, self._width)
        end = aligned(size)
        p = slot[end : end + chunk.rows * self._probs_dtype.itemsize].view(self._probs_dtype)
        return x, p

    def _fill(
        self, i: int, slot: torch.Tensor, fields: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring what has arrived into the experts' order."""
        x, p = self._halves(slot, self._plan.chunks[i])
        order = self._exchange.order(self._plan, i)
        select_rows(fields[0], order, x)
        select_rows(fields[1], order, p.unsqueeze(1))
        return x, p

    def _has_work(self, i: int) -> bool:
        """Whether the experts are called: for empty chunks only if they would not be called at
        all, since Megatron gathers parameters when a module is first called, on all ranks."""
        chunks = self._plan.chunks
        return chunks[i].rows > 0 or (i == 0 and not any(chunk.rows for chunk in chunks))

    def _tokens(self, index: torch.Tensor) -> torch.Tensor:
        return index // self._plan.experts

    def _take(self, purpose: str, i: int, nbytes: int) -> torch.Tensor:
        return self._memory.ring.take(purpose, i % self._depth, nbytes)

    def _send_buffer(self, i: int, row: Row) -> torch.Tensor:
        return self._take("send", i, self._plan.chunks[i].sent_rows * row.nbytes)

    def _back_buffer(self, i: int, row: Row) -> torch.Tensor:
        size = self._plan.chunks[i].sent_rows * row.nbytes
        return self._take("returned", i, size)[:size]

    def _post(self, i: int, row: Row, send: torch.Tensor) -> Transfer:
        chunk, exchange = self._plan.chunks[i], self._exchange
        table = send[: chunk.sent_rows * row.nbytes].view(chunk.sent_rows, row.nbytes)
        if exchange.ep_size == 1:
            return Transfer(table, table, None)
        size = chunk.received_rows * row.nbytes
        out = self._take("receive", i, size)[:size].view(-1, row.nbytes)
        return exchange.send(out, table, chunk.sent, chunk.received)

    def _arrived(self, i: int, row: Row) -> torch.Tensor:
        """All rows of chunk ``i``, 1-D uint8, in the order in which they came."""
        arrived = self._transfers.pop(i).wait()
        return self._exchange.gather(arrived, self._plan.chunks[i]).view(-1)

    def _post_back(self, i: int, row: Row, back: torch.Tensor) -> Transfer:
        chunk, exchange = self._plan.chunks[i], self._exchange
        table = back[: chunk.received_rows * row.nbytes].view(chunk.received_rows, row.nbytes)
        if exchange.ep_size == 1:
            return Transfer(table, table, None)
        out = self._back_buffer(i, row).view(-1, row.nbytes)
        return exchange.send(out, table, chunk.received, chunk.sent)
