"""Steps of a trainer whose microbatches differ in length, planned for them or not, on gloo ranks.

Weights do not change between steps, and gradients add up over them. A result is of every rank:
{"returned": {microbatch: bytes}, "gradients": {global name: bytes}, "steps": what each was planned
for, "log": text}.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_ext
from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from megatron_ext.integration.callbacks import Step  # noqa: E402
from megatron_ext.integration.features.lengths.replicas import LossFunctions  # noqa: E402
from megatron_ext.integration.pipeline import ScheduledPipeline  # noqa: E402
from megatron_ext.integration.utils import unwrapped  # noqa: E402
from tests.megatron.cases import gpt_cases  # noqa: E402
from tests.megatron.cases.gpt_cases import VOCAB, global_names, to_bytes  # noqa: E402
from tests.support.case_server import serve  # noqa: E402
from tests.support.step_lengths import STEPS  # noqa: E402

_OURS = {"microbatch_costs": "lengths"}
_FREE = _OURS | {"reorder_microbatches": True}
_VEE = {"schedule": "v-half", "chunks": 2}
# Both data replicas share the experts of a stage.
_EXPERTS = {
    "parallel": {"expert_model_parallel_size": 2},
    "config": {"num_moe_experts": 4, "moe_grouped_gemm": False, "add_bias_linear": False},
}
CASES: dict[str, dict[str, Any]] = {
    "stock": {},
    "zb-h1": {"schedule": "zb-h1", "options": _OURS},
    "v-half": _VEE | {"options": _OURS},
    "v-half-equal": _VEE,
    "zb-h1-free": {"schedule": "zb-h1", "options": _FREE, "again": True},
    "v-half-free": _VEE | {"options": _FREE, "again": True},
    "dropped-in": {"schedule": "zb-h1", "options": _FREE, "door": "forward_backward_func"},
    "function": {"schedule": "zb-h1", "options": _FREE, "form": "pair", "function": True},
    "zb-h1-slices": {"schedule": "zb-h1", "options": _OURS | {"slice_tokens": 4}},
    "v-half-slices": _VEE | {"options": _OURS | {"slice_tokens": 4}},
    "v-zb-slices-free": {
        "schedule": "v-zb",
        "chunks": 2,
        "options": _FREE | {"slice_tokens": 4},
    },
    "three-slices": {"schedule": "zb-h1", "options": _FREE | {"slices": 3}},
    "replicas": {"schedule": "zb-h1", "options": _FREE, "world": 4, "form": "object"},
    "experts-stock": {"world": 4, **_EXPERTS},
    "experts": {"schedule": "zb-h1", "options": _FREE, "world": 4, **_EXPERTS},
    # A call says how long its own replica's sequences may be.
    "experts-named": _VEE | {"world": 4, "named": (16, 100_000), **_EXPERTS},
    "refusals": {"main": "refusals"},
    "collectives": {"main": "collectives"},
}


def batch_of(tokens: int, seed: int, form: str) -> Any:
    """One microbatch of one sequence, as trainers have it."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(VOCAB, (1, tokens + 1), generator=generator)
    tokens_, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if form == "pair":
        return tokens_, labels
    if form == "object":
        return SimpleNamespace(input_ids=tokens_, labels=labels)
    return {"tokens": tokens_, "labels": labels}


def forward_step(iterator: Iterator[Any], model: Any) -> Any:
    """As trainers do it; what is reported of a microbatch says which one it was."""
    batch = next(iterator)
    if isinstance(batch, dict):
        batch = batch.pop("tokens"), batch.pop("labels")
    elif not isinstance(batch, tuple):
        batch = batch.input_ids, batch.labels
    tokens, labels = batch
    positions = torch.arange(tokens.shape[1])[None]
    mask = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1]), diagonal=1).bool()
    losses = model(tokens, positions, mask, labels=labels)

    def loss_function(output: torch.Tensor) -> Any:
        loss = output.float().sum()
        # Two numbers would be a sum and its tokens.
        every = torch.nn.functional.pad(output.detach(), (0, 3))
        return loss, {"loss": loss.detach().clone(), "losses": every}

    return losses, loss_function


def trained(case: dict[str, Any], orders: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """The steps.

    Args:
        orders: of every step's microbatches; None: as they are.
    """
    chunks, form = case.get("chunks", 1), case.get("form", "mapping")
    log, steps = io.StringIO(), list[dict[str, Any]]()
    logging.getLogger("megatron_ext").addHandler(logging.StreamHandler(log))
    options = dict(case.get("options", {}))
    if case.get("function"):
        options["microbatch_costs"] = lambda batch: batch[0].shape[1]
    step: Callable[..., Any] | None = None
    if case.get("door"):
        step = getattr(megatron_ext, case["door"])(case["schedule"], **options)
    elif "schedule" in case:
        megatron_ext.enable(case["schedule"], **options)
    gpt_cases.initialize(2, chunks, **case.get("parallel", {}))
    config = case.get("config", {})
    if config:
        config = config | {"expert_model_parallel_size": 2}
    one = {"pp": 2, "chunks": chunks, "lengths": True, "hidden": 32, "config": config}
    models, bare = gpt_cases.build(one, gpt_cases.config_of(one))
    step = step or get_forward_backward_func()
    returned: dict[str, bytes] = {}
    with watching(steps):
        for number, lengths in enumerate(STEPS):
            replica = parallel_state.get_data_parallel_rank()
            order = orders[number] if orders is not None else range(len(lengths))
            data: list[Any] = []
            for _ in models:
                batches = [batch_of(lengths[j] - replica, 100 * number + j, form) for j in order]
                data.append(iter(batches))
            result = step(
                forward_step_func=forward_step,
                data_iterator=data if chunks > 1 else data[0],
                model=models if chunks > 1 else models[0],
                num_microbatches=len(lengths),
                seq_length=case.get("named", (16, 16))[replica],
                micro_batch_size=1,
                forward_only=False,
            )
            for j, found in zip(order, result):
                name = f"{replica}-{number}-{j}"
                returned[name] = to_bytes(found["loss"]) + to_bytes(found["losses"])
    gradients = {
        name: to_bytes(parameter.main_grad)
        for chunk in bare
        for name, parameter in global_names(unwrapped(chunk)).items()
    }
    return {"returned": returned, "gradients": gradients, "steps": steps, "log": log.getvalue()}


class watching:
    """Notes what every training step of ours was planned for.

    Args:
        steps: takes it.
    """

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self._steps, self._complete = steps, ScheduledPipeline._complete

    def __enter__(self) -> None:
        complete, steps = self._complete, self._steps

        @functools.wraps(complete)
        def noted(pipeline: Any, step: Step) -> None:
            complete(pipeline, step)
            loads = step.loads
            steps.append(
                {
                    "plan": step.plan.fingerprint(),
                    "units": step.plan.costs.units,
                    "slices": step.plan.slices,
                    "peak": step.recorder.peak_sets,
                    "planned": float(step.plan.peak_activation()[step.rank] * step.plan.chunks),
                    "own": loads is not None and bool(loads.units),
                    "order": None if loads is None else loads.order,
                    "tokens": None if loads is None else loads.tokens,
                    "tried": hasattr(step.call.iteration.forward_step_func, "__wrapped__"),
                }
            )

        ScheduledPipeline._complete = noted  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        ScheduledPipeline._complete = self._complete  # type: ignore[method-assign]


def trained_again(case: dict[str, Any]) -> dict[str, Any]:
    """The steps; then stock's, with the data in the order that each step has had."""
    found = trained(case)
    megatron_ext.disable()
    parallel_state.destroy_model_parallel()
    orders = [step["order"] for step in found["steps"]]
    return found | {"stock": trained({}, orders)}


def refusals(case: dict[str, Any]) -> dict[str, str]:
    """What a step says that cannot be planned."""
    out: dict[str, str] = {}
    gpt_cases.initialize(2, 1)
    one = {"pp": 2, "chunks": 1, "lengths": True, "hidden": 32}

    def call(data: Any, options: dict[str, Any] = _OURS) -> str:
        models, _ = gpt_cases.build(one, gpt_cases.config_of(one))
        megatron_ext.enable(options.pop("schedule", "zb-h1"), **options)
        try:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data,
                model=models[0],
                num_microbatches=3,
                seq_length=16,
                micro_batch_size=1,
                forward_only=False,
            )
        except ValueError as error:
            return str(error)
        finally:
            megatron_ext.disable()
        return ""

    def some(form: str = "mapping", count: int = 3) -> Iterator[Any]:
        return iter([batch_of(3 + j, j, form) for j in range(count)])

    out["pairs"] = call(some("pair"))
    out["ended"] = call(some(count=2))
    out["function"] = call(some(), {"microbatch_costs": lambda batch: -1})
    out["cap"] = call(
        some(), {"schedule": "v-cap", "memory_cap": 0.5, "microbatch_costs": "lengths"}
    )
    return out


def collectives(case: dict[str, Any]) -> list[str]:
    """What is said of a loss function that talks to the other rank, first where that one takes the
    same passes, then where it is of another data replica; and how often it was called."""
    said, calls = [], list[str]()

    def loss_function(name: str, output: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        found = output.detach().sum()
        dist.all_reduce(found)
        return found

    def step(name: str) -> Any:
        return torch.ones(2, requires_grad=True), functools.partial(loss_function, name)

    for ranks in ([0, 1], [dist.get_rank()]):
        checked = LossFunctions().checked(step, ranks)
        for name in ("first", "second"):
            output, function = checked(name)
            try:
                said.append(str(float(function(output))))
            except ValueError as error:
                said.append(str(error))
                break
    return [*said, " ".join(calls)]


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One case on one rank; rank 0 gathers and writes."""
    world = case.get("world", 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    main = trained_again if case.get("again") else globals()[case.get("main", "trained")]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, main(case))
    if rank == 0:
        (folder / "result.pickle").write_bytes(pickle.dumps(every))
    dist.barrier()


if __name__ == "__main__":
    serve(CASES, rank_main, 2)
