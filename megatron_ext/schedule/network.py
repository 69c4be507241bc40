"""Messages in the event loop: transfers that run in the order of their streams, as NCCL's do.

Collectives of a sharded vocabulary have a communicator of their own, and a latency alone.

A transfer starts when both ends have come to it, and both streams are busy until it ends: a receive
that was posted ahead waits in its stream for the sender, and holds back what comes behind it. A
send comes to its stream when the pass before it in the rank's list has ended; so does a receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from .actions import Action, AnyAction, Op, Operation
from .effects import CARRIED, inputs
from .event_loop import SLOT_KINDS, Lane, Program, Row

STREAMS = ("edge", "pair", "rank")

# Kinds of slots behind the program's, by the stage that a message goes to, for activations; those
# for gradients are one more. At the receiver, it has arrived; at the sender, it has left. At
# either: the rank's list has come to it; it stands at the head of its stream, for the peer, and
# for what comes next in the hardware queue. Each is waited for in one place.
_ARRIVED, _LEFT, *_ENDS = range(SLOT_KINDS, SLOT_KINDS + 16, 2)
_POSTED, _READY, _QUEUED = zip(_ENDS[::2], _ENDS[1::2])  # of the sender, of the receiver
_KINDS = SLOT_KINDS + 16


class Network(NamedTuple):
    """How messages wait for each other.

    Attributes:
        streams: what has a stream of its own: ``edge`` (each direction between two ranks),
            ``pair`` (two ranks), or ``rank`` (all messages of a rank).
        queue: all passes and messages of a rank go through one hardware queue
            (``CUDA_DEVICE_MAX_CONNECTIONS=1``): each starts no sooner than the one before it in
            the rank's list. Copies of offloaded sets do not.
    """

    streams: str
    queue: bool = False

    @property
    def words(self) -> list[str]:
        """As options of the command line."""
        return ["--p2p", self.streams, *(["--queue", "1"] if self.queue else [])]

    def stream(self, peer: int, sends: bool) -> tuple[int, ...]:
        """Which of a rank's streams a message is in."""
        if self.streams == "rank":
            return ()
        return (peer, sends) if self.streams == "edge" else (peer,)


class NetworkProgram(Program):
    """Slots and lanes of a pipeline whose messages take their place in streams."""

    @property
    def pass_slots(self) -> int:
        return self.slots

    @property
    def slots(self) -> int:
        return self.slot(_KINDS, 0)

    def lane(self, op: Operation, stage: int) -> Lane:
        lane, rank_of = super().lane(op, stage), self.placement.rank_of
        for kind, other in inputs(op, stage, self.placement.num_stages)[-1:]:
            if rank_of(other) != rank_of(stage):
                lane = lane._replace(
                    needs=[(self.slot(_ARRIVED + (kind is Op.B), stage), 0), *lane.needs[1:]]
                )
        return lane

    def with_messages(
        self, lists: Sequence[Sequence[AnyAction]], rows: Sequence[Row], network: Network
    ) -> list[Row]:
        """What the event loop runs: ``rows``, which come to messages too, and each stream's row.

        Args:
            lists: lowered.
            rows: of the compute and offload actions of ``lists``.
            network: how messages wait for each other.
        """
        out: list[Row] = []
        streams: list[Row] = []
        for actions, row in zip(lists, rows):
            mine: dict[tuple[int, ...], Row] = {}
            nodes = iter(row)
            compute: Row = []
            queued: tuple[tuple[int, int], ...] = ()  # the message before in the hardware queue
            for action in actions:
                if action.is_compute and queued:
                    lane, j = next(nodes)
                    needs = [(slot + j, latency) for slot, latency in lane.needs]
                    gives = [slot + j for slot in lane.gives]
                    compute.append((Lane(lane.took, [*needs, *queued], gives), 0))
                    queued = ()
                elif action.is_compute or action.is_copy:
                    compute.append(next(nodes))
                elif isinstance(action, Action) and isinstance(action.op, Op):
                    (peer, other), j = action.peer(self.placement), action.microbatch
                    sends, backward = action.op.is_send, CARRIED[action.op] is Op.B
                    stage = other.stage if sends else action.stage
                    slot = partial(self.slot, stage=stage, microbatch=j)
                    posted = slot(_POSTED[sends] + backward)
                    ready = slot(_READY[sends] + backward)
                    there = slot(_READY[not sends] + backward)
                    done = slot((_LEFT if sends else _ARRIVED) + backward)
                    follows = slot(_QUEUED[sends] + backward)
                    compute.append((Lane(0, (), [posted]), 0))
                    mine.setdefault(network.stream(peer, sends), []).extend(
                        [
                            (Lane(0, [(posted, 0), *queued], [ready, follows]), 0),
                            (Lane(self.durations.hop, [(there, 0)], [done]), 0),
                        ]
                    )
                    queued = ((follows, 0),) if network.queue else ()
            out.append(compute)
            streams += mine.values()
        return out + streams
