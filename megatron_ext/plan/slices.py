"""Slices of sequences in a plan: which jobs training cuts, and what the slices cost."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from ..schedule import GENERATORS, ScheduleSpec
from ..schedule.select import IN_PAIRS
from ..schedule.units import shares_of
from .model import Job

FLAG = "--pp-slices"
PACKED = ("--sft", "--dataloader-inter-document-masking")  # they pack documents in sequences
NUMBERS = (2, 4)  # of slices that a search tries
LONG = 16_384  # tokens of a sequence that is worth cutting whatever the microbatches
# Tokens that W of a slice takes longer by, whatever its own (docs/concepts/slices.md).
_SHORT = 1_400

ASSUMPTIONS = (
    f"slices of a sequence: W of every slice takes as long as that of {_SHORT} tokens more, as "
    "measured for a hidden size of 4096 on an H200; attention is causal, and as fast in slices",
)


def attention_share(tokens: int | Fraction, hidden: int) -> Fraction:
    """Of core attention in F of a whole sequence, as training takes it for its orders.

    Of a layer with 12 h^2 weights, causal: 2 h s of 24 h^2 + 2 h s operations a token.
    """
    return Fraction(tokens) / (12 * hidden + tokens)


def overhead(tokens: int) -> Fraction:
    """Share of a whole microbatch's W that the W of every slice takes, however short it is.

    Args:
        tokens: of a microbatch.
    """
    return min(Fraction(1), Fraction(_SHORT, tokens))


def _may_cut(job: Job) -> bool:
    """True if training cuts the job's sequences."""
    whole = job.overlap_moe_expert_parallel_comm or (job.vocab_parallel and job.mtp_layers)
    return not (whole or job.context_parallel_size > 1 or job.recipe or job.window)


def worth_it(spec: ScheduleSpec, job: Job) -> bool:
    """True where slices may gain much: few microbatches, or long sequences."""
    if spec.offload or spec.cap is not None or not _may_cut(job):
        return False
    if spec.name in IN_PAIRS or GENERATORS[spec.name].takes_memory_cap:
        return False
    if job.num_experts:  # what few tokens cost experts was not measured
        return False
    return spec.microbatches < 2 * spec.pp or job.seq_length >= LONG


def sliced(spec: ScheduleSpec, job: Job, number: int) -> ScheduleSpec:
    """``spec`` with every microbatch in so many slices that take equally long."""
    counts = (number,) * spec.microbatches
    share, more = attention_share(job.seq_length, job.hidden_size), overhead(job.tokens)
    shares = shares_of(counts, share, None, more)
    return replace(spec, slices=counts, costs=spec.costs.with_units(shares or ()))


def simulate_words(spec: ScheduleSpec, job: Job) -> list[str]:
    """Of ``megatron-ext simulate``, for the same slices."""
    if not spec.slices:
        return []
    return [
        *("--slices", str(spec.slices[0])),
        *("--attention-share", str(attention_share(job.seq_length, job.hidden_size))),
        *("--slice-overhead", str(overhead(job.tokens))),
    ]
