"""Cases of messages between ranks; see ``rank_cases``."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.runtime import toy
from tests.ranks.runtime.context import Context, channel, raised
from tests.support.waiting import wait_until


def wrong_messages(context: Context) -> list[str]:
    """Sends that the channel has to refuse."""
    pipe = channel(context)
    good = torch.zeros(toy.SHAPE)
    return [
        raised(lambda: pipe.send(good[:-1], 0, 1)),
        raised(lambda: pipe.send(good.t(), 0, 1)),
        raised(lambda: pipe.send(good.double(), 0, 1)),
        str(pipe.sending_to()),
    ]


def drained(context: Context, directory: str) -> dict[str, Any]:
    """The first rank sends (non-contiguous tensors too), the second takes them late."""
    pipe = channel(context)
    sent_all, taking = Path(directory, "sent all"), Path(directory, "taking")
    dist.barrier(context.group)
    if context.rank == 1:
        wait_until(sent_all.exists, "the sends have not returned")
        time.sleep(0.3)  # In which only a sender that does not wait would end.
        taking.touch()
        return {"got": [pipe.receive(0, tag).wait().tolist() for tag in (7, 5, 6)]}
    wide = torch.arange(float(toy.ROWS * toy.HIDDEN)).view(toy.HIDDEN, toy.ROWS)
    sent = [torch.full(toy.SHAPE, 5.0), torch.full(toy.SHAPE, 6.0), wide.t()]
    for tag, tensor in zip((5, 6, 7), sent):
        pipe.send(tensor, 1, tag)
    before = pipe.sending_to()
    sent_all.touch()
    expected = [sent[2].tolist(), sent[0].tolist(), sent[1].tolist()]
    # ``settle`` and ``finish`` share the count of what is settled.
    pipe.settle(1, 2)
    after_two = pipe.sending_to()
    pipe.settle(1, 1)
    pipe.finish()
    return {
        "sent": expected,
        "pending": [before, after_two, pipe.sending_to()],
        "waited": taking.exists(),
    }


def crossed(context: Context, nccl: bool) -> list[float]:
    """Two messages, received in the other order."""
    pipe = channel(context, nccl=nccl)
    if context.rank == 0:
        for value in (5, 6):
            pipe.send(torch.full(toy.SHAPE, float(value)), 1, value)
        pipe.finish()
        return []
    receipts = {tag: pipe.receive(0, tag) for tag in (6, 5)}
    return [float(receipts[tag].wait()[0, 0]) for tag in (5, 6)]


def held_back(context: Context, way: str) -> list[str]:
    """The first rank receives from 1 and 2; 1 sends when it has heard that 2's message came, or
    that it cannot come before."""
    pipe = channel(context, way=way, nccl=True)
    done = Path(context.folder, f"{way} done")
    message = torch.zeros(toy.SHAPE)
    dist.barrier(context.group)
    if context.rank:
        if context.rank == 1:
            wait_until(done.exists, "the first rank says nothing")
        pipe.send(message, 0, 0)
        pipe.finish()
        return []
    first, second = pipe.receive(1, 0), pipe.receive(2, 0)
    if way == "edge":
        second.wait()
        done.touch()
        first.wait()
        return ["2 before 1"]
    time.sleep(0.2)  # in which it could have come
    early = second.work.is_completed()
    done.touch()
    first.wait()
    second.wait()
    return ["2 before 1" if early else "2 after 1"]


def late_shapes(context: Context) -> Any:
    """Shapes that vary, of a peer that sends late."""
    pipe = channel(context, nccl=True, varying=True)
    posted = Path(context.folder, "posted")
    dist.barrier(context.group)
    if context.rank == 0:
        wait_until(posted.exists, "the receives wait for the messages")
        for rows in (3, 2):
            pipe.send(torch.full((rows, toy.HIDDEN), 1.0), 1, rows)
        pipe.finish()
        return "sent"
    receipts = [pipe.receive(0, 3), pipe.receive(0, 2)]
    posted.touch()
    wait_until(lambda: receipts[1].shape[1].is_completed(), "no shape comes")
    first = receipts[0].wait()
    under_way = "posted without wait" if receipts[1].work else "not posted"
    return [list(first.shape), list(receipts[1].wait().shape), under_way]


def pending(context: Context) -> list[str | None]:
    """The oldest message under way, by the rules of NCCL, while the peer comes late."""
    pipe = channel(context, nccl=True, way="edge alone")  # nobody else's from here on
    seen = Path(context.folder, "seen")
    dist.barrier(context.group)
    if context.rank == 0:
        pipe.send(torch.zeros(toy.SHAPE), 1, 0)
        found = [pipe.pending()]
        seen.touch()
        pipe.finish()
        return [*found, pipe.pending()]
    wait_until(seen.exists, "the first rank sends nothing")
    receipt = pipe.receive(0, 0)
    receipt.work.wait()
    arrived = pipe.pending()
    receipt.wait()
    never = pipe.receive(0, 1)
    found = [arrived, pipe.pending()]
    del never
    return found


def buffered(context: Context) -> list[int]:
    """How many buffers there are after each of two iterations of two messages each way."""
    found = []
    for _ in range(2):
        pipe = channel(context, way="edge,buffers")
        peer = 1 - context.rank
        receipts = [pipe.receive(peer, tag) for tag in range(1)]
        pipe.send(torch.full(toy.SHAPE, float(context.rank)), peer, 0)
        for receipt in receipts:
            assert float(receipt.wait().sum()) == peer * toy.ROWS * toy.HIDDEN
        pipe.finish()
        found.append(sum(map(len, pipe._edges._free.values())))
    return found


def many_receives(context: Context, count: int) -> int:
    """Every pair exchanges ``count`` messages, all receives posted first, waited for in disorder.

    Returns how many arrived wrong.
    """
    pipe = channel(context)
    others = [r for r in range(context.size) if r != context.rank]
    posted = {(r, i): pipe.receive(r, i) for i in range(count) for r in others}
    for i in range(count):
        for r in others:
            value = context.rank * 10_000 + i
            pipe.send(torch.full(toy.SHAPE, float(value)), r, i)
    order = list(posted)
    random.Random(context.rank).shuffle(order)
    wrong = sum(not bool((posted[r, i].wait() == r * 10_000 + i).all()) for r, i in order)
    pipe.finish()
    return wrong
