"""What ``plan``'s answer is compared with, and never slower than: the user's flags as they are, and
the best of stock Megatron that fits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan.alone import without_pipeline
from ..plan.flags import job_of
from ..plan.gpu import Gpu
from ..plan.point import Point, evaluate
from ..plan.result import Result, sizes_of
from ..plan.rows import Families
from ..plan.search import search
from ..plan.space import SearchSpace
from ..plan.stock import allows, named, of_stock
from . import plan_space
from .plan_given import Given
from .plan_report import point_json

YOURS, STOCK = "yours", "stock"
_SHARE = 0.2  # of the work, for stock's best


@dataclass(frozen=True)
class Baselines:
    """Both of them.

    Attributes:
        yours: a point, or why there is none.
        stock: of what fits the fastest, else the smallest; None: there is none.
        families: for other searches.
    """

    yours: Point | str
    stock: Point | None
    families: Families

    def seeds(self, spaces: Sequence[SearchSpace], *, alone: bool) -> list[Point]:
        """Those that may be the answer.

        Args:
            spaces: what is searched.
            alone: no pipeline may be one, too.
        """
        found = [p for p in (self.yours, self.stock) if isinstance(p, Point)]
        by_sizes = {sizes_of(space.job): space for space in spaces}
        return [
            point
            for point in found
            if (space := by_sizes.get(sizes_of(point.job))) is not None
            and (allows(space, point.spec, point.job) if point.is_pipeline else alone)
        ]


def baselines(
    args: argparse.Namespace,
    given: dict[str, Any],
    gpu: Gpu,
    own: Given,
    spaces: Sequence[SearchSpace],
    budgets: tuple[int, int | None],
    progress: Callable[[str], None],
) -> Baselines:
    """Simulate them.

    Args:
        given: Megatron's arguments by name, as the user has them.
        own: the user's own pipeline.
        spaces: what is searched.
        budgets: bytes of a rank on the device, and on the host.
    """
    families = Families()
    progress("your flags as they are")
    yours = _yours(args, given, gpu, own)
    progress("stock schedules that fit")
    stock = None
    try:
        asked = [of_stock(space) for space in spaces]
        found = search(asked, *budgets, progress, families=families, share=_SHARE)
        stock = found.best or found.smallest
    except ValueError:
        pass  # Megatron has none for these numbers
    return Baselines(yours, stock, families)


def _yours(args: argparse.Namespace, given: dict[str, Any], gpu: Gpu, own: Given) -> Point | str:
    """Without offload, on Megatron's own split; why there is none if it does not exist."""
    one = argparse.Namespace(**{**vars(args), "micro_batch_sizes": None, "pp": None})
    try:
        job = job_of(given)
        space = plan_space.of_division(one, job, gpu, own)
        job = space.job
        if space.pp < 2:
            return without_pipeline(space, job)
        placement = own.placement(space.pp)
        split, count = space.even(job, placement), job.microbatches()
        if split is None:
            return (
                f"your flags do not divide {job.num_layers} layers over {placement.num_stages} "
                f"stages ({space.pp} ranks x {own.chunks}), so Megatron does not start with them"
            )
        if own.schedule == "interleaved" and count % space.pp:
            return f"{count} microbatches are no multiple of the {space.pp} ranks of interleaving"
        work = space.workload(job, count, split)
        return evaluate(named(job, own.schedule, work, own.chunks), work)
    except ValueError as error:
        return str(error)


def baselines_json(found: Baselines, result: Result, gpu: Gpu) -> dict[str, Any]:
    """``baselines``: the rows, as ``point_json``, with ``what`` (yours or stock's), ``fits`` and
    ``gain``: by which share an iteration is shorter than that of ``reference``.
    ``yours_impossible``: why there is no row of the user's own; null if there is one."""
    rows = []
    mine = found.yours if isinstance(found.yours, Point) else None
    for what, point in ((YOURS, mine), (STOCK, found.stock)):
        if point is not None:
            rows.append({"what": what, **point_json(point, gpu), "fits": result.fits(point)})
    beside = reference(rows)
    for row in rows:
        row["gain"] = None if beside is None else gain(row, beside)
    why = found.yours if isinstance(found.yours, str) else None
    return {"baselines": rows, "yours_impossible": why}


def reference(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that gains are of: the user's own, but stock's if only that fits."""
    fitting = [row for row in rows if row["fits"]]
    return next(iter(fitting or [row for row in rows if row["what"] == YOURS]), None)


def gain(row: dict[str, Any], beside: dict[str, Any]) -> float:
    """By which share of the time of ``beside`` an iteration is shorter."""
    return float(1 - row["iteration_ms"] / beside["iteration_ms"])
