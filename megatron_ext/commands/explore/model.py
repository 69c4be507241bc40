"""A model and a GPU behind the page: times in ms and bytes of every rank, as ``plan`` has them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ..._input import flag_of, size_text
from ...plan.flags import job_of
from ...plan.gpu import Gpu, gpu_of
from ...plan.layout import split_of
from ...plan.model import Job, PlanError
from ...plan.space import SearchSpace
from ...plan.workload import Workload
from ...schedule import GENERATORS, Placement, Schedule, ScheduleSpec
from .. import plan_input
from ..parser import InputError, Options, Parser

# What follows from the model and the GPU, so that it is no option beside them.
_OWN = ("cost", "hop", "stage_cost", "exchange", "vocabulary", "vocabulary_barriers")
_WHOLE = ("slices", "microbatch_cost")
_RESERVE = 6 << 30  # for libraries and communicators, as plan's


def declare_model(parser: Parser) -> None:
    """The model, as ``plan`` takes it, and the GPU."""
    plan_input.declare(parser)
    _GPU.declare(parser)
    parser.set_defaults(pp=None)


_GPU = Options(
    {"--gpu GPU": "with a model: its times on this GPU (default H100), or on that of FILE.json"}
)


def model_of(args: argparse.Namespace) -> Model | None:
    """The model that the options describe; None without one.

    Raises:
        PlanError, InputError: it is not complete.
    """
    given, _, _ = plan_input.given(args)
    if not given:
        if args.gpu is not None:
            raise InputError(f"--gpu {args.gpu} is for a model; give --from-args too")
        return None
    return Model(job_of(given), gpu_of(args.gpu or "H100"))


@dataclass(frozen=True)
class Model:
    """A training job on a GPU."""

    job: Job
    gpu: Gpu

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks and microbatches that the page begins with."""
        pp = max(2, self.job.pipeline_model_parallel_size)
        try:
            return {"pp": pp, "microbatches": self.job.microbatches()}
        except PlanError:  # no global batch
            return {"pp": pp, "microbatches": 2 * pp}

    @property
    def budget_bytes(self) -> int:
        """Of a rank's device, less what libraries take."""
        return self.gpu.memory_bytes - _RESERVE

    @property
    def json(self) -> dict[str, Any]:
        """For the page."""
        job = self.job
        text = (
            f"{job.num_layers} layers, hidden {job.hidden_size}, sequence {job.seq_length}, micro "
            f"batch {job.micro_batch_size}, TP {job.tensor_model_parallel_size} on {self.gpu.name} "
            f"({size_text(self.budget_bytes)} to use)"
        )
        return {**self.sizes, "text": text, "budget": self.budget_bytes / 2**30}

    def refuse(self, args: argparse.Namespace) -> None:
        """Options that the model decides, or whose bytes are not known.

        Raises:
            InputError: one of them is given.
        """
        for option in (*_OWN, *_WHOLE):
            if getattr(args, option) is not None:
                why = "is of whole microbatches" if option in _WHOLE else "decides it"
                raise InputError(
                    f"{flag_of(option)} {getattr(args, option)}: the model {why}; leave it out"
                )

    def workload(self, args: argparse.Namespace, placement: Placement) -> Workload:
        """Times and bytes of the stages of ``placement``.

        Raises:
            PlanError: the layers do not divide.
        """
        job = self.job.with_(pipeline_model_parallel_size=placement.pp)
        split = split_of(job, placement.num_stages, placement.looped)
        if split is None:
            raise PlanError(f"{job.num_layers} layers do not divide into {placement.num_stages}")
        return self._space(placement.pp).workload(job, args.microbatches, split)

    def asked(self, args: argparse.Namespace, workload: Workload, placement: Placement) -> None:
        """Put the stages' times, and those of copies, into ``args``."""
        args.costs = workload.costs
        if args.offload not in (None, "off"):
            link = self._space(placement.pp).link(workload, placement)
            args.offload_time = link.text

    def _space(self, pp: int) -> SearchSpace:
        return SearchSpace(self.job, self.gpu, pp)

    def placement(self, args: argparse.Namespace, name: str, file: Schedule | None) -> Placement:
        """Of a schedule of the page."""
        if file is not None:
            return file.placement
        chunks = args.chunks if GENERATORS[name].any_chunks else None
        return ScheduleSpec(name, args.pp, 1, chunks).placement
