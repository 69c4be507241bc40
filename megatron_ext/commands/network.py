"""Options and output on how messages between ranks wait for each other."""

from __future__ import annotations

import argparse
from typing import Any

from ..schedule.network import STREAMS, Network
from .common import InputError


def add_network_options(group: argparse._ActionsContainer) -> None:
    """How messages between ranks wait for each other."""
    group.add_argument(
        "--p2p",
        choices=("ideal", *STREAMS),
        default="ideal",
        help="message streams: one per message (ideal, the default), per direction between two "
        "ranks (edge), per two ranks (pair), or per rank (rank)",
    )
    group.add_argument(
        "--queue",
        type=int,
        choices=(1,),
        help="one hardware queue per rank, as with CUDA_DEVICE_MAX_CONNECTIONS=1; with --p2p",
    )


def network_of(args: argparse.Namespace) -> Network | None:
    """What ``add_network_options`` got; None for ideal messages.

    Raises:
        InputError: a queue of ideal messages.
    """
    if args.p2p != "ideal":
        return Network(args.p2p, args.queue == 1)
    if args.queue is not None:
        raise InputError("--queue 1 is a queue of messages in streams; give --p2p edge, pair, rank")
    return None


def network_json(network: Network | None) -> dict[str, Any]:
    """``p2p`` and ``queue``, if messages wait for each other."""
    if network is None:
        return {}
    return {"p2p": network.streams, **({"queue": 1} if network.queue else {})}


def network_text(network: Network | None) -> str:
    """For people, behind the costs."""
    if network is None:
        return ""
    own = {"edge": "each direction between two ranks", "pair": "two ranks", "rank": "each rank"}
    queue = ", one hardware queue a rank" if network.queue else ""
    return f"; one message stream for {own[network.streams]}{queue}"
