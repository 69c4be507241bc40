"""A trainer without Megatron's arguments, on gloo ranks, under stock's schedules and ours.

Its steps are those of reinforcement learning: an actor and a critic are trained, a reference model
is only evaluated; every microbatch has a length of its own, every step another number of them, and
per-token log-probabilities come back. A result is {"returned": {step: bytes}, "gradients": {model:
{global name: bytes}}, ...}; other cases try what ``enable`` must refuse.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import megatron_ext
from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import (  # noqa: E402
    get_forward_backward_func,
    p2p_communication,
    schedules,
)

from megatron_ext.integration.features.slices.wanted import Wanted  # noqa: E402
from megatron_ext.integration.utils import unwrapped  # noqa: E402
from megatron_ext.integration.versions import megatron_version  # noqa: E402
from tests.megatron.cases import gpt_cases  # noqa: E402
from tests.megatron.cases.gpt_cases import BATCH, VOCAB, global_names, to_bytes  # noqa: E402
from tests.megatron.cases.hook_cases import megatron_symbols  # noqa: E402
from tests.megatron.cases.user_weights import users_weights  # noqa: E402
from tests.support import one_process  # noqa: E402
from tests.support.case_server import serve, write_all  # noqa: E402

__all__ = ["users_weights"]  # a case's ``main``

MODELS = {"actor": 32, "reference": 32, "critic": 16}  # hidden sizes
STEPS = (4, 7, 5)  # microbatches of each
EXPERTS = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": False,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
_EXPERTS = {"pp": 2, "world": 2, "config": EXPERTS}
_VEE = {"pp": 2, "world": 2, "schedule": "v-half", "chunks": 2}
CASES: dict[str, dict[str, Any]] = {
    "one-process": {"pp": 1, "world": 1},
    "stock-2": {"pp": 2, "world": 2},
    "stock-4": {"pp": 4},
    "zb-h1-2": {"pp": 2, "world": 2, "schedule": "zb-h1"},
    "v-half-2": _VEE,
    "zb-h1-4": {"pp": 4, "schedule": "zb-h1"},
    "v-half-4": {"pp": 4, "schedule": "v-half", "chunks": 2},
    "v-zb-4-offloaded": {
        "pp": 4,
        "schedule": "v-zb",
        "chunks": 2,
        "options": {"offload": "full"},
    },
    # Two pipelines, with another number of microbatches in each.
    "zb-h1-unequal": {"pp": 2, "schedule": "zb-h1", "unequal": True},
    "v-half-4-groups": {"pp": 4, "schedule": "v-half", "chunks": 2, "groups": True},
    "stock-experts": _EXPERTS,
    "zb-h1-experts": {
        **_EXPERTS,
        "schedule": "zb-h1",
        # More chunks round differently.
        "options": {"moe_pipeline_chunks": 1, "moe_memory_reuse": "s3"},
    },
    # Megatron's own schedule; only the MoE layers are ours.
    "stock-chunked-experts": {
        **_EXPERTS,
        "schedule": None,
        "options": {"moe_pipeline_chunks": 1, "moe_memory_reuse": "s4"},
    },
    "stock-wide": {"pp": 2, "world": 2, "wide": True},
    "zb-h1-wide": {"pp": 2, "world": 2, "schedule": "zb-h1", "wide": True},
    "one-process-slices": {"pp": 1, "world": 1, "config": EXPERTS, "alone": 3},
    "one-process-whole": {"pp": 1, "world": 1, "config": EXPERTS},
    "v-half-slices": {**_EXPERTS, **_VEE, "options": {"slices": 3}},
    "zb-h1-slices": {
        **_EXPERTS,
        "schedule": "zb-h1",
        "options": {"slices": 3},
    },
    "users-weights": {
        **_EXPERTS,
        "main": "users_weights",
        "ways": {
            "zb-h1": {"schedule": "zb-h1"},
            "chunked": {"schedule": "zb-h1", "moe_pipeline_chunks": 1, "moe_memory_reuse": "none"},
            "stock-chunked": {"moe_pipeline_chunks": 1, "moe_memory_reuse": "none"},
        },
    },
    "stock-new-numbers": {"pp": 2, "world": 2, "main": "new_numbers"},
    "v-half-new-numbers": _VEE | {"main": "new_numbers"},
    "refusals": {"pp": 2, "world": 2, "main": "refusals"},
    "refusals-of-models": {"pp": 2, "world": 2, "main": "refusals_of_models"},
}


def case_of(case: dict[str, Any], hidden: int) -> dict[str, Any]:
    """A model of ``gpt_cases``."""
    return {
        "pp": case["pp"],
        "chunks": case.get("chunks", 1),
        "lengths": True,
        "hidden": hidden,
        "config": case.get("config", {}),
    }


def build(case: dict[str, Any], hidden: int) -> list[Any]:
    """Chunks of a model on this rank."""
    one = case_of(case, hidden)
    return gpt_cases.build(one, gpt_cases.config_of(one))[0]


def forward_step(iterator: Iterator[Any], model: Any) -> Any:
    """As trainers do it: the loss, and what the trainer wants back."""
    tokens, labels = next(iterator)
    positions = torch.arange(tokens.shape[1]).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1]), diagonal=1).bool()
    losses = model(tokens, positions, mask, labels=labels)

    def loss_func(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        loss = output.float().mean()
        found = {"loss": loss.detach().clone(), "log_probs": (-output).detach().clone()}
        return found if non_loss_data else (loss, found)

    return losses, loss_func


def wide(model: Any) -> None:
    """Let stages send each other twice the hidden size, as for distillation."""
    inner = unwrapped(model)
    forward, take = inner.forward, inner.set_input_tensor

    def sends_more(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(*args, **kwargs)
        return output if inner.post_process else torch.cat([output, output], dim=-1)

    def takes_half(tensor: Any) -> None:
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        take(tensor if tensor is None else tensor[..., : inner.config.hidden_size])

    inner.forward, inner.set_input_tensor = sends_more, takes_half


def wider(received: Any, sent: Any) -> Any:
    """The shapes of what such stages send, where they are known."""
    return tuple(
        [(*shape[:-1], 2 * shape[-1]) if shape else shape for shape in shapes]
        for shapes in (received, sent)
    )


def batches(microbatches: int, seed: int) -> Iterator[Any]:
    """Each with another length."""
    for number in range(microbatches):
        generator = torch.Generator().manual_seed(100 * seed + number)
        tokens = torch.randint(VOCAB, (BATCH, 9 + 3 * ((number + seed) % 3)), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(
    case: dict[str, Any],
    models_of: dict[str, int] = MODELS,
    steps: Sequence[int] = STEPS,
) -> dict[str, Any]:
    """Steps of all models.

    Args:
    """
    chunks, schedule = case.get("chunks", 1), case.get("schedule")
    log = io.StringIO()
    logging.getLogger("megatron_ext").addHandler(logging.StreamHandler(log))
    if "schedule" in case:
        megatron_ext.enable(schedule, **case.get("options", {}))
    if "alone" in case:
        one_process.install(Wanted(case["alone"]), megatron_version())
    gpt_cases.initialize(case["pp"], chunks)
    models = {name: build(case, hidden) for name, hidden in models_of.items()}
    step, last = get_forward_backward_func(), parallel_state.is_pipeline_last_stage()
    more: dict[str, Any] = {}
    if case.get("wide"):
        more["adjust_tensor_shapes_fn"] = wider
        for model in models.values():
            wide(model[0])
    returned: dict[str, bytes] = {}
    for number, microbatches in enumerate(steps):
        if case.get("unequal"):
            microbatches += parallel_state.get_data_parallel_rank()
        for name, model in models.items():
            for chunk in model:
                chunk.zero_grad_buffer()
            evaluated = name == "reference"
            seed = number + 10 * len(name)
            data = [batches(microbatches, seed) for _ in model]
            with torch.no_grad() if evaluated else contextlib.nullcontext():
                result = step(
                    forward_step_func=forward_step,
                    data_iterator=data if chunks > 1 else data[0],
                    model=model if chunks > 1 else model[0],
                    num_microbatches=microbatches,
                    seq_length=1,
                    micro_batch_size=BATCH,
                    forward_only=evaluated,
                    collect_non_loss_data=evaluated,
                    **more,
                    **groups(case, model[0]),
                )
            if last:
                assert len(result) == microbatches
                for number_, one in enumerate(result):
                    key = f"{name}-{number}-{number_}"
                    returned[key] = to_bytes(one["loss"]) + to_bytes(one["log_probs"])
    gradients = {
        f"{name}.{key}": to_bytes(parameter.main_grad)
        for name, model in models.items()
        for chunk in model
        for key, parameter in global_names(unwrapped(chunk)).items()
    }
    return {"returned": returned, "gradients": gradients, "log": log.getvalue()}


# Microbatches of each step.
NUMBERS = (4, 5, 6, 4, 7, 4)


def new_numbers(case: dict[str, Any]) -> dict[str, Any]:
    """A model whose number of microbatches changes in mid-run."""
    from megatron_ext.integration import plans

    kept: list[int] = []
    lowered = plans.Plans.lowered

    def noted(self: Any, microbatches: int, *args: Any, **kwargs: Any) -> Any:
        plan = lowered(self, microbatches, *args, **kwargs)
        kept.append(len(self._kept))
        return plan

    plans.Plans.lowered, plans.MOST_PLANS = noted, 3  # type: ignore[method-assign]
    found = trained(case, {"actor": 32}, NUMBERS)
    megatron_ext.disable()
    return {**found, "kept": max(kept, default=0)}


def groups(case: dict[str, Any], model: Any) -> dict[str, Any]:
    """A communicator and process groups in the call, as Megatron's main branch has them."""
    if not case.get("groups"):
        return {}
    from megatron.core.process_groups_config import ProcessGroupCollection

    collection = ProcessGroupCollection.use_mpu_process_groups()
    return {
        "pg_collection": collection,
        "p2p_communicator": p2p_communication.P2PCommunicator(
            pp_group=collection.pp, config=unwrapped(model).config
        ),
    }


def error_of(do: Callable[[], Any]) -> str:
    """Type and text of what ``do`` raises; the hooks are given back."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        megatron_ext.disable()
    return ""


def refusals(case: dict[str, Any]) -> dict[str, Any]:
    """What ``enable`` refuses before there is a model."""
    enable, out = megatron_ext.enable, {}
    symbols = megatron_symbols()
    out["unknown"] = error_of(lambda: enable("v-half", memory="0.5"))
    out["no_schedule"] = error_of(lambda: enable(memory_cap=0.5))
    out["nothing"] = error_of(enable)
    out["name"] = error_of(lambda: enable("v-hlaf"))
    out["auto"] = error_of(lambda: enable("auto"))
    out["bytes"] = error_of(lambda: enable("v-cap", memory_cap="40GiB"))
    out["vocab_parallel"] = error_of(lambda: enable("zb-h1", vocab_parallel=True))
    out["offload"] = error_of(lambda: enable("zb-h1", offload="some"))
    out["type"] = error_of(lambda: enable("gis", profile_steps="two"))

    def twice() -> None:
        enable("zb-h1")
        enable("zb-h1")

    out["twice"] = error_of(twice)

    original = schedules.forward_backward_pipelining_without_interleaving
    schedules.forward_backward_pipelining_without_interleaving = lambda **kwargs: None
    del original
    out["replaced"] = error_of(lambda: enable("zb-h1"))
    from importlib import reload

    reload(schedules)  # Megatron's own again, as a new object
    symbols = megatron_symbols()
    report = enable("v-half", offload="half")
    out["hooks"], out["report"] = list(report.hooks), str(report)
    megatron_ext.disable()
    symbols = megatron_symbols() | symbols  # enabling has loaded modules, too
    out["same_after_disable"] = megatron_symbols() == symbols
    drop_in = megatron_ext.forward_backward_func("zb-h1")
    out["same_with_drop_in"] = megatron_symbols() == symbols
    del drop_in

    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("megatron_ext").addHandler(handler)
    enable("zb-h1")
    sys.modules["megatron_ext.integration.entry_point"]._current.warn_if_unused()  # as at the end
    out["unused"] = log.getvalue()
    megatron_ext.disable()

    def applied() -> None:
        megatron_ext.apply({"pp_schedule": "zb-h1"})
        get_forward_backward_func(pp_size=2)(forward_step_func=None)

    out["dead_apply"] = error_of(applied)
    return out


def refusals_of_models(case: dict[str, Any]) -> dict[str, Any]:
    """What the first call with a model refuses."""
    out: dict[str, Any] = {}

    def call(
        schedule: str,
        chunks: int = 1,
        enabled_first: bool = True,
        initialized_first: bool = False,
        model_case: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        door: str = "enable",
        **kwargs: Any,
    ) -> str:
        one = {"pp": 2, "chunks": chunks, "lengths": True, **(model_case or {})}

        def do() -> None:
            opened = None
            if initialized_first:
                gpt_cases.initialize(2, chunks)
            if enabled_first:
                opened = getattr(megatron_ext, door)(schedule)
            if not initialized_first:
                gpt_cases.initialize(2, chunks)
            config = gpt_cases.config_of(one)
            vars(config).update(settings or {})
            models, _ = gpt_cases.build(one, config)
            if not enabled_first:
                opened = getattr(megatron_ext, door)(schedule)
            step = opened if door == "forward_backward_func" else get_forward_backward_func()
            data = [batches(4, 0) for _ in models]
            step(
                forward_step_func=forward_step,
                data_iterator=data if chunks > 1 else data[0],
                model=models if chunks > 1 else models[0],
                num_microbatches=4,
                seq_length=1,
                micro_batch_size=BATCH,
                **kwargs,
            )

        text = error_of(do)
        parallel_state.destroy_model_parallel()
        return text

    out["one_chunk"] = call("v-half")
    out["two_chunks"] = call("zb-h1", 2)
    out["no_chunks"] = call("interleaved-zb")
    out["built_before"] = call("v-half", 2, enabled_first=False, initialized_first=True)
    out["wrapped_before"] = call(
        "zb-h1", enabled_first=False, model_case={"overlap": True}, initialized_first=True
    )
    out["late_but_right"] = call("zb-h1", enabled_first=False, initialized_first=True)
    out["drop_in_overlap"] = call(
        "zb-h1", model_case={"overlap": True}, door="forward_backward_func"
    )
    out["conflict"] = call("zb-h1", settings={"delay_wgrad_compute": True})

    class OtherCommunicator(p2p_communication.P2PCommunicator):  # type: ignore[misc]
        """Of several pipelines."""

    out["communicator"] = call(
        "zb-h1", p2p_communicator=OtherCommunicator.__new__(OtherCommunicator)
    )
    return out


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One case on one rank; rank 0 gathers and writes."""
    world = case.get("world", gpt_cases.WORLD)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mine = globals()[case.get("main", "trained")](case)
    write_all(folder, mine)


if __name__ == "__main__":
    serve(CASES, rank_main, gpt_cases.WORLD)
