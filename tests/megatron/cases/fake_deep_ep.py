"""DeepEP's ``Buffer`` over gloo, with its call contract; import it before Megatron.

It fails where the real one does: operands of other types, shapes or layouts; a handle of another
buffer, or a second use of one in the same role; allocation on its stream without an event to wait
for. Whatever an asynchronous call returns is NaN or -7 until its event was waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist


class EventHandle:
    """An event of the current stream."""


class EventOverlap:
    """An event, and what becomes true when it was waited for."""

    def __init__(self, event: Any = None, done: Callable[[], None] | None = None) -> None:
        self.event, self._done = event, done

    def current_stream_wait(self) -> None:
        assert self.event is not None, "an event without a handle cannot be waited for"
        if self._done is not None:
            done, self._done = self._done, None
            done()


class Handle(tuple[Any, ...]):
    """What a dispatch gives for its combine, and for both passes of its gradients."""

    used: set[str]


def _check(x: torch.Tensor, dtype: torch.dtype, columns: int | None = None) -> None:
    assert x.dim() == 2 and x.is_contiguous(), "EP_HOST_ASSERT: 2-D and contiguous"
    assert x.dtype == dtype, f"EP_HOST_ASSERT: {dtype}, got {x.dtype}"
    assert columns is None or x.shape[1] == columns, "EP_HOST_ASSERT: columns"


def _later(
    results: list[torch.Tensor], previous: Any, asynchronous: bool, on_stream: bool
) -> tuple[list[torch.Tensor], EventOverlap]:
    """The results as an asynchronous call gives them."""
    assert not on_stream or (previous is not None and asynchronous), "EP_HOST_ASSERT: allocation"
    if previous is not None:
        previous.current_stream_wait()
    if not asynchronous:
        return results, EventOverlap()
    empty = [torch.full_like(t, torch.nan if t.is_floating_point() else -7) for t in results]

    def done() -> None:
        for target, source in zip(empty, results):
            target.copy_(source)

    return empty, EventOverlap(EventHandle(), done)


class Buffer:
    """One rank's; ``calls`` are those of all buffers of the process."""

    calls: ClassVar[list[str]] = []

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self._size = group.size()

    @staticmethod
    def set_num_sms(number: int) -> None:
        assert number % 2 == 0

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        def hint(hidden_bytes: int, size: int) -> int:
            return hidden_bytes * size

        return SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=hint)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        _check(topk_idx, torch.int64)
        each = num_experts // self._size
        chosen = topk_idx >= 0
        rank = torch.where(chosen, topk_idx // each, -1)
        to = torch.stack([(rank == r).any(1) for r in range(self._size)], 1)
        experts = torch.bincount(topk_idx[chosen], minlength=num_experts).int()
        found, event = _later(
            [to.sum(0).int(), experts, to], previous_event, async_finish, allocate_on_comm_stream
        )
        return found[0], None, found[1], found[2], event

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        _check(x, torch.bfloat16)
        assert x.shape[1] * x.element_size() % 16 == 0, "EP_HOST_ASSERT: whole int4 in a row"
        flags = async_finish, allocate_on_comm_stream
        if handle is not None:
            sent, received = self._use(handle, "dispatch", len(x), 0)
            self.calls.append("dispatch again")
            rows = self._carry(x.index_select(0, torch.cat(sent)), [len(s) for s in sent], received)
            (rows,), event = _later([rows], previous_event, *flags)
            return rows, None, None, None, None, event
        if previous_event is not None:
            previous_event.current_stream_wait()  # the layout is ready
        _check(topk_idx, torch.int64)
        _check(topk_weights, torch.float32, topk_idx.shape[1])
        assert is_token_in_rank.dtype == torch.bool and num_tokens_per_rank.dtype == torch.int32
        each = len(num_tokens_per_expert) // self._size
        sent = [is_token_in_rank[:, r].nonzero().view(-1) for r in range(self._size)]
        assert [len(s) for s in sent] == num_tokens_per_rank.tolist()
        self.calls.append("dispatch")
        sizes = torch.tensor([len(s) for s in sent])
        counts = torch.empty_like(sizes)
        dist.all_to_all_single(counts, sizes, group=self.group)
        received, order = counts.tolist(), torch.cat(sent)
        to = torch.repeat_interleave(torch.arange(self._size), sizes).unsqueeze(1)
        local = topk_idx.index_select(0, order) - to * each
        here = (local >= 0) & (local < each)
        weights = topk_weights.index_select(0, order) * here
        out = [
            self._carry(part.contiguous(), sizes.tolist(), received)
            for part in (x.index_select(0, order), torch.where(here, local, -1), weights)
        ]
        experts = torch.bincount(out[1][out[1] >= 0], minlength=each).tolist()
        made = Handle((self, sent, received, len(x), topk_idx.shape[1]))
        made.used = set()
        found, event = _later(out, previous_event, *flags)
        return *found, experts, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        _check(x, torch.bfloat16)
        role = "combine" if topk_weights is None else "combine gradients"
        sent, received = self._use(handle, role, len(x), 1)
        self.calls.append(role)
        parts = [x]
        if topk_weights is not None:
            _check(topk_weights, torch.float32, handle[4])
            parts.append(topk_weights)
        out = []
        for part in parts:
            rows = self._carry(part, received, [len(s) for s in sent])
            total = torch.zeros((handle[3], part.shape[1]))
            out.append(total.index_add_(0, torch.cat(sent), rows.float()).to(part.dtype))
        flags = async_finish, allocate_on_comm_stream
        found, event = _later(out, previous_event, *flags)
        return found[0], found[1] if len(found) > 1 else None, event

    def _use(self, handle: Any, role: str, rows: int, side: int) -> tuple[list[torch.Tensor], Any]:
        assert isinstance(handle, Handle), "combine before dispatch: there is no handle"
        owner, sent, received, tokens, _ = handle
        assert owner is self, "a handle of another buffer"
        assert role not in handle.used, f"a handle was used twice for {role}"
        handle.used.add(role)
        assert rows == (sum(received) if side else tokens), "EP_HOST_ASSERT: rows of the handle"
        return sent, received

    def _carry(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = rows.new_empty((sum(received), rows.shape[1]))
        width = rows.shape[1] * rows.element_size()
        given, target = (t.view(torch.uint8).view(-1, width) for t in (rows, out))
        dist.all_to_all_single(target, given, received, sent, group=self.group)
        return out


def install() -> None:
    """Let ``import deep_ep`` give this."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer = Buffer  # type: ignore[attr-defined]
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap  # type: ignore[attr-defined]
    package.utils = utils  # type: ignore[attr-defined]
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})
