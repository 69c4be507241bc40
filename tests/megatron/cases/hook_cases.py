"""Applies and reverts all hooks on the Megatron that is importable; prints one JSON object."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from megatron_ext import cpu
from megatron_ext.integration import ConfigError, install
from megatron_ext.integration.versions import megatron_version, parse
from tests.support.stand_ins import megatron_args

TARGETS = (
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication",
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "megatron.core.parallel_state:is_pipeline_last_stage",
    "megatron.core.parallel_state:initialize_model_parallel",
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
    "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
    "megatron.core.models.gpt.gpt_model:GPTModel.forward",
    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
    "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
    "megatron.core.transformer.moe.router:TopKRouter.routing",
    "megatron.core.transformer.moe.router:TopKRouter._apply_aux_loss",
    "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
    "megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
    "megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
    "megatron.core.transformer.moe.router:switch_load_balancing_loss_func",
    "megatron.core.transformer.moe.router:z_loss_func",
    "megatron.core.models.gpt.gpt_model:GPTModel.sharded_state_dict",
    "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
    "megatron.core.pipeline_parallel.utils:is_pp_last_stage",
    "megatron.core.pipeline_parallel.utils:is_vp_last_stage",
    "megatron.core.tensor_parallel.mappings:_ReduceScatterToSequenceParallelRegion",
)


def prediction_targets(version: tuple[int, ...]) -> list[str]:
    """Where multi-token prediction looks at logits, and at the tokens behind a slice."""
    names = ["roll_tensor", "process_mtp_loss"]
    if version >= (0, 19):
        names.append("_compute_mtp_acceptance_counts")
    return [f"megatron.core.transformer.multi_token_prediction:{name}" for name in names]


def held(target: str) -> Any:
    """The object that a target is now, without descriptors."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name)


def megatron_symbols(wanted: Callable[[Any], bool] = lambda value: True) -> dict[str, int]:
    """Identity of all ``wanted`` globals of all loaded Megatron modules, and of their classes'
    attributes."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "megatron" or module is None:
            continue
        for key, value in vars(module).items():
            if wanted(value):
                found[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, inner in vars(value).items():
                    if not wanted(inner):
                        continue
                    found[f"{name}:{key}.{attribute}"] = id(inner)
    return found


def main() -> None:
    """See the module's text."""
    out: dict[str, Any] = {}
    out["installed_without_flags"] = install(
        ["--num-layers", "2", "--pipeline-model-parallel-size", "4"]
    )
    out["megatron_loaded_without_flags"] = "megatron.core" in sys.modules
    cpu.install()
    from megatron.core import package_info, parallel_state

    version = parse(megatron_version())
    targets = (*TARGETS, *prediction_targets(version))
    for target in targets:
        held(target)

    consumer = types.ModuleType("a_training_script")
    consumer.mpu_last = parallel_state.is_pipeline_last_stage  # type: ignore[attr-defined]
    sys.modules[consumer.__name__] = consumer
    from megatron_ext.integration.feature import Run
    from megatron_ext.integration.features.schedule.choose import ScheduleRequest
    from megatron_ext.integration.hooks import Hook
    from megatron_ext.integration.install import Installation
    from megatron_ext.integration.targets import Target
    from megatron_ext.schedule.spec import Cut

    before = {target: held(target) for target in targets}
    symbols = megatron_symbols()
    installation = Installation()
    args = megatron_args(
        pp_schedule="v-half",
        pp_vocab_parallel=True,
        pp_slices=2,
        transformer_impl="local",
        pipeline_model_parallel_size=4,
        distributed_timeout_minutes=1,
        rank=0,
    )
    version, training = installation.hooks.version, "megatron.training" in sys.modules
    request = replace(ScheduleRequest.of("v-half"), cut=Cut((8, 16), Fraction(0)))
    choice = request.resolve(4, None, 8)
    installation.start(Run(args, version, training, schedule=choice, chunks=2))
    out["changed"] = {t: held(t) is not before[t] for t in targets}
    out["consumer_rebound"] = consumer.mpu_last is parallel_state.is_pipeline_last_stage  # type: ignore[attr-defined]
    out["report"] = installation.hooks.report()
    changed = {k for k, v in megatron_symbols().items() if symbols.get(k, v) != v}
    out["changed_symbols"] = sorted(changed)
    installation.revert()
    out["restored"] = {t: held(t) is before[t] for t in targets}
    out["same_after_revert"] = {
        k: v for k, v in megatron_symbols().items() if k in symbols
    } == symbols

    # As a version that nobody knows yet: hooked with a warning, refused where a hook does not fit.
    package_info.__version__ = "99.1.0"
    handler, warnings = logging.Handler(), list[str]()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    broken = Installation()
    out["warnings"] = warnings
    good = Hook(Target.at(TARGETS[5], "vp_stage"), lambda original: lambda *a, **k: None, "test")
    broken.hooks.apply([good])
    out["newer_is_hooked"] = held(TARGETS[5]) is not before[TARGETS[5]]
    broken.revert()
    for name, bad in {
        "missing": Hook(
            Target.at("megatron.core.parallel_state:no_such"), lambda o: o, "of a test"
        ),
        "signature": Hook(Target.at(TARGETS[6], "no_such_parameter"), lambda o: o, "of a test"),
        "narrow": Hook(Target.at(TARGETS[6]), lambda o: lambda virtual=None: None, "of a test"),
    }.items():
        try:
            broken.hooks.apply([good, bad])
        except ConfigError as error:
            out[f"{name}_error"] = str(error)
        out[f"{name}_all_or_nothing"] = held(TARGETS[5]) is before[TARGETS[5]]
    print("RESULT " + json.dumps(out))


if __name__ == "__main__":
    main()
