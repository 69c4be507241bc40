"""The job of a library's model, from its configuration and its first call."""

from __future__ import annotations

from dataclasses import replace

from ....plan.layout import Split
from ....plan.model import PlanError
from ...feature import Run
from ...utils import gather, gather_over, unwrapped
from .job import job_of_args, log_equal


def describe_model(run: Run) -> None:
    """The job of a library's model, for the length that the first rank of its calls names. All
    ranks of a call do this together.
    """
    request, args = run.request, run.args
    assert request is not None
    if request.costs is not None or request.file is not None:
        return
    models = [unwrapped(model) for model in run.models]
    layers = [len(getattr(getattr(m, "decoder", None), "layers", ())) for m in models]
    predicts = [bool(getattr(m, "mtp_process", False)) for m in models]
    every = gather((layers, predicts), run.group)
    length, samples = gather_over((args.seq_length, args.micro_batch_size), run.groups)[0]
    placement = request.placement_on(len(every), run.chunks)
    at = [(placement.rank_of(s), placement.chunk_of(s)) for s in range(placement.num_stages)]
    counts = tuple(every[rank][0][chunk] for rank, chunk in at)
    depths = [stage for stage, (rank, chunk) in enumerate(at) if every[rank][1][chunk]]
    split = Split(counts, predicts=depths[0] if depths else -1)
    try:
        if not sum(counts):
            raise PlanError(f"its class {type(models[0]).__name__} is not modelled")
        job = job_of_args(args).with_(seq_length=length, micro_batch_size=samples)
    except PlanError as error:
        log_equal(args, error)
        return
    run.request = replace(request, job=job, splits=lambda stages: split)
