"""What a process has before and after us, and what of ours outlives its model, group or call.

A result is a list of what each rank found; see ``test_lifetime.py``.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_ext
from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from megatron_ext.integration import utils  # noqa: E402
from megatron_ext.integration.feature import Run  # noqa: E402
from megatron_ext.integration.features.moe.layer import PipelinedMoE  # noqa: E402
from megatron_ext.integration.features.schedule.choose import ScheduleRequest  # noqa: E402
from megatron_ext.runtime import communicators, edges, watchdog  # noqa: E402
from megatron_ext.runtime.wgrad import WeightGradStore  # noqa: E402
from tests.megatron.cases import gpt_cases  # noqa: E402
from tests.megatron.cases.gpt_cases import BATCH, SEQUENCE, to_bytes  # noqa: E402
from tests.megatron.cases.process_state import (  # noqa: E402
    differences,
    holders,
    noted_waits,
    process,
)
from tests.support.case_server import serve, write_all  # noqa: E402
from tests.support.stand_ins import megatron_args  # noqa: E402

# The package has a function of this name.
install: Any = importlib.import_module("megatron_ext.integration.install")
entry_point: Any = importlib.import_module("megatron_ext.integration.entry_point")
library: Any = importlib.import_module("megatron_ext.integration.library")

EXPERTS = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": False,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
CASES: dict[str, dict[str, Any]] = {
    "models": {"main": "models"},
    "failed": {"main": "failed"},
    "ends": {"main": "ends"},
    "dense": {"main": "dense", "timeout": timedelta(hours=3)},
    "groups": {"main": "groups"},
    "given back": {"main": "given_back"},
    "late": {"main": "late"},
    "beside": {"main": "beside"},
    "compiled": {"main": "compiled", "layer": "mlp.linear_fc1"},
    "compiled-slices": {"main": "compiled", "layer": "self_attention", "slices": 3},
    "compiled-router": {"main": "compiled", "layer": "mlp.router", "slices": 3, "config": EXPERTS},
    "compiled-offload": {
        "main": "compiled",
        "layer": "mlp.linear_fc1",
        "schedule": "1f1b",
        "offload": "full",
    },
    "experts": {"main": "experts"},
    "replicas": {"main": "replicas", "world": 4},
    "unlike": {"main": "unlike", "world": 4},
}


# --- one small model and its steps ---


def initialize(chunks: int = 1) -> None:
    """Megatron's groups of two pipeline ranks."""
    gpt_cases.initialize(2, chunks)


def build(chunks: int = 1, config: dict[str, Any] | None = None) -> list[Any]:
    """This rank's chunks of the model."""
    case = {"pp": 2, "chunks": chunks, "config": config or {}}
    return gpt_cases.build(case, gpt_cases.config_of(case))[0]


def step(
    models: list[Any],
    function: Callable[..., Any] | None = None,
    microbatches: int = 4,
    length: int = SEQUENCE,
    forward_only: bool = False,
) -> Any:
    """One training step; what the function returns."""

    def batches() -> Iterator[Any]:
        for tokens, labels in gpt_cases.batches(microbatches, False):
            yield tokens[:, :length].contiguous(), labels[:, :length].contiguous()

    for model in models:
        model.zero_grad_buffer()
    data = [batches() for _ in models]
    return (function or get_forward_backward_func())(
        forward_step_func=gpt_cases.forward_step,
        data_iterator=data if len(models) > 1 else data[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=microbatches,
        seq_length=length,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


def failed(case: dict[str, Any]) -> Any:
    """The same where opening has failed halfway."""
    initialize()
    found = {}
    for name, options in {"unknown": {"schedule": "zb-h1", "memory": 1}}.items():
        before = process()
        try:
            megatron_ext.enable(**options)
            text = "nothing"
        except ValueError as error:
            text = str(error)
        found[name] = text, differences(before, process())
        megatron_ext.disable()
    return found


# --- every door, and what goes on behind it ---

_HALF = {"offload": "half"}
_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
DOORS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # Number of chunks, options, the model's configuration.
    "split backward": (1, {"schedule": "zb-h1"}, {}),
    "V placement, offload": (2, {"schedule": "v-half", **_HALF}, {}),
    "messages": (2, {"schedule": "interleaved", "p2p": "edge"}, {}),
    "trace": (1, {"schedule": "1f1b", "trace": "traces"}, {}),
    "recompute": (1, {"schedule": "zb-h2"}, _RECOMPUTED),
    "experts, split": (
        1,
        {"schedule": "zb-h1", "moe_pipeline_chunks": 2, "moe_memory_reuse": "s3"},
        EXPERTS,
    ),
    "experts": (
        1,
        {"schedule": None, "moe_pipeline_chunks": 2, "moe_memory_reuse": "s4"},
        EXPERTS,
    ),
}
_FLAGS: dict[str, dict[str, Any]] = {
    "vocabulary": {"pp_schedule": "v-half", "pp_vocab_parallel": True},
    "profile": {"pp_schedule": "zb-h1", "pp_profile_steps": 2},
}


def given_back(case: dict[str, Any]) -> Any:
    """What is not as before after each door is closed."""
    found: dict[str, list[str]] = {}
    round_trip(1, None, {})  # what Megatron itself leaves, such as groups that it keeps
    before = process()

    def closed(name: str, changed: list[str]) -> None:
        nonlocal before
        after = process()
        found[name], before = differences(before, after) + changed, after

    for name, (chunks, options, config) in DOORS.items():
        opening = functools.partial(megatron_ext.enable, **options)
        closed(name, round_trip(chunks, opening, config))
    changed = round_trip(1, None, {}, megatron_ext.forward_backward_func("zb-h1", **_HALF))
    communicators.close()  # they end with their group
    closed("function", changed)
    for name, flags in _FLAGS.items():
        by_flags(flags)
        closed(f"flags, {name}", [])
    if dist.get_rank() == 0:  # a second for a look, so one for all doors
        found[f"flags, {name}"] += holders()
    return found


def round_trip(
    chunks: int,
    opening: Callable[[], Any] | None,
    config: dict[str, Any],
    function: Callable[..., Any] | None = None,
) -> list[str]:
    """Train a model twice behind a door, and close it; what of the model is not as before."""
    if opening is not None:
        opening()
    initialize(chunks)
    models = build(chunks, config)
    before = _state(models)
    for _ in range(2):
        step(models, function)
    del function
    megatron_ext.disable()
    after = _state(models)
    parallel_state.destroy_model_parallel()
    del models
    gc.collect()
    keys = before.keys() | after.keys()
    return [
        f"{k}: {before.get(k)} -> {after.get(k)}" for k in keys if before.get(k) != after.get(k)
    ]


# What Megatron sets in a step; and its hooks, made again for gradients outside of autograd.
_OF_A_STEP = {
    *("current_microbatch", "input_layernorm_checkpoint", "pre_mlp_norm_checkpoint"),
    "_megatron_ext_grad_hooks",
}


def _state(models: list[Any]) -> dict[str, str]:
    """The configuration of a model, and names and methods of its modules."""
    found = {}
    for i, model in enumerate(models):
        config = vars(utils.unwrapped(model).config)
        found |= {f"config {key}": repr(value) for key, value in config.items()}
        for name, module in model.named_modules():
            found |= {f"{i} {name}.{key}": "set" for key in vars(module).keys() - _OF_A_STEP}
            found[f"{i} {name}.forward"] = module.forward.__qualname__
    return found


def by_flags(flags: dict[str, Any]) -> None:
    """Megatron's arguments ask for it, as its validation finds them."""
    installation = entry_point.opened(install.Installation)
    args = megatron_args(
        pipeline_model_parallel_size=2,
        distributed_timeout_minutes=1,
        rank=0,
        data_parallel_size=1,
        micro_batch_size=1,
        global_batch_size=4,
        **flags,
    )
    choice = ScheduleRequest.of(flags["pp_schedule"]).resolve(2, None, 4)
    version, chunks = installation.hooks.version, 2 if "v-" in flags["pp_schedule"] else 1
    installation.start(Run(args, version, False, schedule=choice, chunks=chunks))
    assert len(installation.hooks.bindings) > 5
    megatron_ext.revert()


# --- holders, other doors ---

_LATE = (
    ("megatron.core.pipeline_parallel.utils", "is_pp_last_stage"),
    ("megatron.core.parallel_state", "is_pipeline_last_stage"),
    ("megatron.core.parallel_state", "initialize_model_parallel"),
    ("megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving"),
    ("torch.distributed", "destroy_process_group"),
)


def late(case: dict[str, Any]) -> Any:
    """A module that imports functions while ours are in their place, and a variable with one."""
    module = types.ModuleType("a_late_module")
    held: dict[str, Any] = vars(module)
    megatron_ext.enable("v-half")
    for owner, name in _LATE:
        held[name] = getattr(importlib.import_module(owner), name)
    sys.modules[module.__name__] = module
    first = {name: id(held[name]) for _, name in _LATE}
    megatron_ext.disable()
    own = {name: id(getattr(sys.modules[owner], name)) for owner, name in _LATE}
    stocks = {name: id(held[name]) for _, name in _LATE}
    megatron_ext.enable("zb-h1")
    again = id(held["forward_backward_pipelining_with_interleaving"]) not in stocks.values()
    initialize()
    variable, model, puts = get_forward_backward_func(), build(), _counted_puts()
    losses = [step(model, variable)]
    postponed = [puts()]
    megatron_ext.disable()
    losses.append(step(model, variable))
    postponed.append(puts())
    del sys.modules[module.__name__]
    return {
        "ours": [first[name] != own[name] for name in own],
        "stock's": [stocks[name] == own[name] for name in own],
        "again": again,
        "postponed": postponed,
        "losses": len({b"".join(to_bytes(x["lm loss"]) for x in one) for one in losses}),
    }


def _counted_puts() -> Callable[[], int]:
    """How many weight gradients have been postponed since."""
    count, put = [0], WeightGradStore.put

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return put(self, *args, **kwargs)

    WeightGradStore.put = counted  # type: ignore[method-assign]

    def read() -> int:
        found, count[0] = count[0], 0
        return found

    return read


def beside(case: dict[str, Any]) -> Any:
    """A function of ours with ``enable``: made before it, and while it is in force."""
    puts, found = _counted_puts(), []
    early = megatron_ext.forward_backward_func("zb-h1")
    megatron_ext.enable("zb-h1")
    initialize()
    models = build()
    between = megatron_ext.forward_backward_func("zb-h2")
    losses = []
    for function in (None, early, None, between, early, None):
        losses.append(step(models, function))
        found.append(puts())
    del early, between, function
    megatron_ext.disable()
    losses.append(step(models))
    found.append(puts())
    texts = {b"".join(to_bytes(x["lm loss"]) for x in one) for one in losses}
    return {"puts": found, "losses": len(texts), "holders": holders()}


def compiled(case: dict[str, Any]) -> Any:
    """Steps of a model before and after its user compiles one of its layers, its attention or its
    router where it runs in slices, or a layer whose tensors are offloaded:
    what is postponed, and the gradients; and how many graphs were compiled."""
    import torch._dynamo as dynamo

    puts, found = _counted_puts(), []
    names = ("slices", "offload")
    options = {name: case[name] for name in names if name in case}
    megatron_ext.enable(case.get("schedule", "zb-h1"), **options)
    initialize()
    models = build(config=case.get("config"))
    layer = utils.unwrapped(models[0]).decoder.layers[0].get_submodule(case["layer"])
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # as ``cpu.install`` has set it, in this rank alone
    with dynamo.config.patch(disable=False):
        for number in range(2):
            if number:
                layer.compile(backend="aot_eager")
            step(models)
            found.append((puts(), [to_bytes(p.main_grad) for p in models[0].parameters()]))
    megatron_ext.disable()
    return {"steps": found, "graphs": dynamo.utils.counters["frames"]["ok"]}


def models(case: dict[str, Any]) -> Any:
    """How many models are alive that were trained, wrapped in Megatron's DDP, and deleted."""
    found = {}
    for schedule, chunks, options in (("zb-h1", 1, {}), ("v-half", 2, {}), ("zb-h1", 1, _HALF)):
        megatron_ext.enable(schedule, **options)
        initialize(chunks)
        alive = []
        for _ in range(2):
            model = build(chunks)
            step(model)
            alive.append(weakref.ref(utils.unwrapped(model[0])))
            del model
        gc.collect()
        found[f"{schedule} {options}"] = sum(ref() is not None for ref in alive)
        megatron_ext.disable()
        parallel_state.destroy_model_parallel()
    return {**found, **wrapper()}


def wrapper() -> dict[str, int]:
    """Whether the wrapper is alive that a model, which still is, was trained in."""
    megatron_ext.enable("zb-h1")
    initialize()
    (model,) = build()
    step([model])
    bare, former = model.module, weakref.ref(model)
    del model
    gc.collect()
    megatron_ext.disable()
    parallel_state.destroy_model_parallel()
    return {f"wrapper of a {type(bare).__name__}": int(former() is not None)}


def ends(case: dict[str, Any]) -> Any:
    """How many losses come back under a V, and which rank is the last when one asks for them."""
    megatron_ext.enable("v-half")
    initialize(2)
    models, found = build(2), []
    for forward_only in (False, True, False):
        losses = step(models, forward_only=forward_only)
        group = parallel_state.get_pipeline_model_parallel_group()
        total = sum((x["lm loss"].sum() for x in losses), torch.zeros(()))
        dist.all_reduce(total, group=group)
        last = importlib.import_module("megatron.core.pipeline_parallel.utils").is_pp_last_stage
        found.append((len(losses), last(group), float(total) / 4))
    megatron_ext.disable()
    return found


def dense(case: dict[str, Any]) -> Any:
    """A flag for MoE layers beside a model without; and the watchdog's limit."""
    megatron_ext.enable("zb-h1", moe_pipeline_chunks=2)
    initialize()
    step(build())
    limit = watchdog.process_watchdog().timeout_seconds
    megatron_ext.disable()
    return {"limit": limit}


def groups(case: dict[str, Any]) -> Any:
    """Groups that are destroyed and made again: which are alive, and their communicators."""
    made, ended, rounds = [0], [0], []
    communicator, end = edges.communicator, edges.end

    def making(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return communicator(*args, **kwargs)

    def ending(backend: Any, abort: bool) -> None:
        ended[0] += not abort
        end(backend, abort)

    edges.communicator, edges.end = making, ending
    megatron_ext.enable("zb-h1")
    alive: list[weakref.ref[Any]] = []
    threads = []
    for again in range(3):
        initialize()
        models = build()
        losses = step(models)
        alive.append(weakref.ref(parallel_state.get_pipeline_model_parallel_group()))
        del models
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()
        held = sum(ref() is not None for ref in alive)
        kept = sum(len(one) for one in communicators.PerGroup.every)
        rounds.append((len(losses), held, kept, made[0] > 0, made[0] - ended[0]))
        threads.append(threading.active_count())
        connect(case, f"store {again}")
    megatron_ext.disable()
    edges.communicator, edges.end = communicator, end
    return {"rounds": rounds, "threads": threads}


# --- waits ---


def replicas(case: dict[str, Any]) -> Any:
    """Two data replicas with other numbers of microbatches, and what they wait for."""
    seen: list[tuple[str, int, bool]] = []
    log = io.StringIO()
    logging.getLogger("megatron_ext").addHandler(logging.StreamHandler(log))
    returned = {}
    with noted_waits(seen):
        for name, options, config in (
            ("offloaded, measured", {"offload": "half"}, {}),
            ("experts", {"moe_pipeline_chunks": 1, "moe_memory_reuse": "s3"}, EXPERTS),
        ):
            megatron_ext.enable("zb-h1", **options)
            initialize()
            models, replica = build(config=config), parallel_state.get_data_parallel_rank()
            for model in models:  # replicas are not reduced: only one of them may step
                utils.unwrapped(model).config.finalize_model_grads_func = None
            lengths = []
            for counts in ((4, 4), (4, 4), (6, 4), (4, 4)) if replica == 0 else ((4, 4),) * 3:
                lengths.append(len(step(models, microbatches=counts[replica])))
            returned[name] = lengths
            megatron_ext.disable()
            parallel_state.destroy_model_parallel()
    return {"seen": seen, "returned": returned, "log": log.getvalue()}


def experts(case: dict[str, Any]) -> Any:
    """Experts in chunks under ``enable`` and under a function of a loop's own: whether the host
    arena has its size from the second step on, and the plans that ``auto`` has tried."""
    ways: dict[str, dict[str, Any]] = {
        "s3": {"moe_pipeline_chunks": 2, "moe_memory_reuse": "s3"},
        "auto": {"moe_pipeline_chunks": "auto"},
    }
    found: dict[Any, Any] = {}
    initialize()
    models = build(config=EXPERTS)
    for door in ("enable", "function"):
        for name, options in ways.items():
            function = None
            if door == "function":
                function = megatron_ext.forward_backward_func("zb-h2", **options)
            else:
                megatron_ext.enable("zb-h2", **options)
            plans = []
            for _ in range(4):
                step(models, function)
                (layers,) = [x for x in gc.get_objects() if isinstance(x, PipelinedMoE)]
                plans.append(str(layers.plan))
            if name == "s3":
                arena = layers.memory.engine.arena
                found[door, name] = arena.capacity_bytes > arena.peak_bytes > 0
            else:
                found[door, name] = plans
            del layers, function
            megatron_ext.disable()
            gc.collect()
    return found


def unlike(case: dict[str, Any]) -> Any:
    """What two pipelines say that exchange tokens, where one has another option."""
    megatron_ext.enable("zb-h1", moe_pipeline_chunks=1 + dist.get_rank() % 2)
    gpt_cases.initialize(2, 1, expert_model_parallel_size=2)
    models = build(config={**EXPERTS, "expert_model_parallel_size": 2})
    try:
        step(models)
        return "nothing"
    except ValueError as error:
        return str(error)
    finally:
        megatron_ext.disable()
        parallel_state.destroy_model_parallel()


def connect(case: dict[str, Any], store: str) -> None:
    """Join the job, whose ranks meet in the file ``store``."""
    way = f"file://{Path.cwd() / store}"
    dist.init_process_group(
        *("gloo", way), case.get("timeout"), rank=case["rank"], world_size=case["world"]
    )


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One case on one rank; rank 0 gathers and writes."""
    world = case.get("world", 2)
    if rank >= world:
        return
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    os.chdir(folder)
    case = {**case, "rank": rank, "world": world}
    connect(case, "store")
    mine = globals()[case["main"]](case)
    write_all(folder, mine)


if __name__ == "__main__":
    serve(CASES, rank_main, gpt_cases.WORLD)
