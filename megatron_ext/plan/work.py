"""Work of making and simulating a point: a count that is the same on every machine."""

from __future__ import annotations

from ..schedule import GENERATORS, ScheduleSpec

SECOND = 1_000_000  # of one core, about

# Of a pass of an order that is fixed, or made for its costs without a search; the latter with
# passes of a vocabulary. What a search adds to both, and to V placement whatever its size.
_FIXED, _LISTED, _SHARDED = 4, 20, 36
_SEARCHED, _SEARCHED_SHARDED, _VEE = 35, 110, 1_500_000
_JOINED, _OFFLOAD, _OFFLOAD_AUTO = 160, 100, 250


def work_of(spec: ScheduleSpec) -> float:
    """Of one schedule."""
    passes = 3 * spec.placement.num_stages * (sum(spec.slices) or spec.microbatches)
    made, more = GENERATORS[spec.name], 0.0
    each = _FIXED if made.fixed else _LISTED
    if spec.barriers:
        each = _SHARDED
    if spec.effort and not made.fixed:
        each += _SEARCHED_SHARDED if spec.barriers else _SEARCHED
        more = _VEE * (made.placement == "vee" and not spec.barriers)
    if spec.overlap:
        each += _JOINED
    if spec.offload is not None:
        each += _OFFLOAD_AUTO if spec.offload.wanted == "auto" else _OFFLOAD
    return each * passes + more
