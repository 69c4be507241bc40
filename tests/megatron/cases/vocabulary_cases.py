"""Builds a GPT with and without ``--pp-vocab-parallel``, and takes checkpoints from one to the
other; see test_vocabulary_model."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from megatron_ext.integration.errors import ConfigError  # noqa: E402
from megatron_ext.integration.feature import Run  # noqa: E402
from megatron_ext.integration.features.schedule.choose import ScheduleRequest  # noqa: E402
from megatron_ext.integration.features.vocabulary import ends  # noqa: E402
from megatron_ext.integration.features.vocabulary import model as vocabulary  # noqa: E402
from megatron_ext.integration.install import Installation  # noqa: E402
from tests.megatron.cases.gpt_cases import config_of, to_bytes  # noqa: E402
from tests.support.case_server import serve  # noqa: E402
from tests.support.stand_ins import megatron_args  # noqa: E402

HIDDEN, SEQUENCE, VOCAB, PP = 32, 16, 1024, 2
WHOLE = "embedding.word_embeddings.weight", "output_layer.weight"

# name -> schedule of both models, chunks, tensor ranks, tied weights, depths of multi-token
# prediction; ``world`` is all ranks.
CASES: dict[str, dict[str, Any]] = {
    "loop": {"schedule": "zb-h1"},
    "loop-tied": {"schedule": "zb-h1", "tied": True},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "vee": {"schedule": "v-half", "chunks": 2},
    "vee-tied": {"schedule": "v-half", "chunks": 2, "tied": True},
    "loop-tp": {"schedule": "zb-h1", "tp": 2, "world": 4},
    "vee-tp-tied": {"schedule": "v-half", "chunks": 2, "tp": 2, "tied": True, "world": 4},
    "passes": {"schedule": "zb-h1", "passes": True},
    "passes-scattered": {"schedule": "zb-h1", "tp": 2, "scatter": True, "world": 4, "passes": True},
    "checkpoint": {"schedule": "zb-h1", "saved": True},
    "checkpoint-tied": {"schedule": "zb-h1", "tied": True, "saved": True},
    "checkpoint-vee-tp": {
        "schedule": "v-half",
        "chunks": 2,
        "tp": 2,
        "world": 4,
        "saved": True,
    },
    "checkpoint-optimizer": {"schedule": "zb-h1", "world": 4, "saved": True, "optimizer": True},
    "checkpoint-mtp": {"schedule": "zb-h1", "mtp": 2, "saved": True},
    "checkpoint-vee-mtp": {"schedule": "v-half", "chunks": 2, "mtp": 1, "saved": True},
    "provider": {"schedule": "zb-h1", "provider": True},
}


@contextlib.contextmanager
def megatron(case: dict[str, Any], ours: bool) -> Iterator[Installation]:
    """Megatron's groups; with ``--pp-vocab-parallel`` if ``ours``, else stock but for a V."""
    chunks, installation = case.get("chunks", 1), Installation()
    args = megatron_args(
        pp_vocab_parallel=ours or None,
        pipeline_model_parallel_size=PP,
        micro_batch_size=1,
        data_parallel_size=1,
        global_batch_size=4,
        distributed_timeout_minutes=1,
        rank=dist.get_rank(),
    )
    choice = ScheduleRequest.of(case["schedule"]).resolve(PP, chunks, 4)
    version = installation.hooks.version
    if ours or choice.vee:
        installation.start(Run(args, version, training=False, schedule=choice, chunks=chunks))
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.get("tp", 1),
            pipeline_model_parallel_size=PP,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        yield installation
    finally:
        parallel_state.destroy_model_parallel()
        installation.revert()


def build(case: dict[str, Any], seed: int = 1) -> list[GPTModel]:
    """This rank's chunks as Megatron builds them, from its seeds."""
    chunks, rank = case.get("chunks", 1), parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(100 * seed + rank)
    model_parallel_cuda_manual_seed(seed)
    more = {"tensor_model_parallel_size": case.get("tp", 1), "mtp_num_layers": case.get("mtp")}
    config = config_of(
        {
            "pp": PP,
            "chunks": chunks,
            "hidden": HIDDEN,
            "config": {**more, "sequence_parallel": case.get("scatter", False)},
        }
    )
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == PP - 1 and chunk == chunks - 1,
            share_embeddings_and_output_weights=case.get("tied", False),
            position_embedding_type="rope",
            mtp_block_spec=prediction(config, chunk if chunks > 1 else None),
            vp_stage=chunk if chunks > 1 else None,
        )
        for chunk in range(chunks)
    ]


def prediction(config: Any, vp_stage: int | None) -> Any:
    """Layers of multi-token prediction of a stage; None: it has none."""
    if not config.mtp_num_layers:
        return None
    layer = get_gpt_layer_local_spec()
    return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)


def gathered(mine: Any) -> list[Any]:
    """Every rank's value."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def wholes(models: list[GPTModel]) -> dict[str, bytes]:
    """Both matrices of a stock model, put together from its tensor ranks."""
    tp = parallel_state.get_tensor_model_parallel_rank()
    mine = {
        (name, tp): p.detach()
        for m in models
        for name, p in m.named_parameters()
        if name in WHOLE and parallel_state.get_data_parallel_rank() == 0
    }
    found = {key: rows for part in gathered(mine) for key, rows in part.items()}
    return {
        name: to_bytes(torch.cat([found[key] for key in sorted(found) if key[0] == name]))
        for name in {key[0] for key in found}
    }


def joined(models: list[GPTModel], tied: bool) -> dict[str, bytes]:
    """Both matrices of a sharded model, put together by the numbers of their rows."""
    shard = vocabulary.shard_of(models)
    assert shard.tied == tied == (shard.output is shard.embedding)
    mine = shard.first_row, shard.embedding.detach(), shard.output.detach()
    every = sorted(gathered(mine), key=lambda part: part[0])
    assert [part[0] for part in every] == [n * len(every[0][1]) for n in range(len(every))]
    found = {
        name: to_bytes(torch.cat([part[i + 1] for part in every])) for i, name in enumerate(WHOLE)
    }
    return found


def sizes(models: list[GPTModel]) -> dict[str, Any]:
    """What one rank holds."""
    named = [(n, p) for m in models for n, p in m.named_parameters()]
    return {
        "bytes": sum(p.numel() * p.element_size() for _, p in named),
        "whole": [name for name, _ in named if name in WHOLE],
        "marked": all(
            p.tensor_model_parallel and p.partition_dim == 0 and p.is_embedding_or_output_parameter
            for name, p in named
            if name.startswith("vocabulary.")
        ),
        "shared": any(m.share_embeddings_and_output_weights for m in models),
        "embedding": ends.embedding_of(models[0]) is not None,
        "hidden": ends.hidden_of(models) is not None,
    }


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Both models, from the same seeds."""
    with megatron(case, ours=False):
        stock = build(case)
        whole, before = wholes(stock), gathered(sizes(stock))
    with megatron(case, ours=True):
        ours = build(case)
        shards, after = joined(ours, case.get("tied", False)), gathered(sizes(ours))
    if case.get("tied"):
        whole[WHOLE[1]] = whole[WHOLE[0]]
    return {"equal": shards == whole, "names": sorted(whole), "before": before, "after": after}


def provider(case: dict[str, Any]) -> dict[str, Any]:
    """Which parts learn, of a model whose script freezes the embedding in the function that builds
    it, and changes the output layer there; and what is said where it changes the loss, there or
    later."""

    def get_model(model_provider_func: Any) -> list[Any]:
        return [model_provider_func()]

    def provide() -> Any:
        (model,) = build(case)
        if model.pre_process:
            model.embedding.requires_grad_(False)
        if model.post_process:
            model.output_layer.weight.data.fill_(3)
        return model

    def with_own_loss() -> Any:
        model = provide()
        if model.post_process:
            model.compute_language_model_loss = lambda labels, logits: logits.mean(-1).t()
        return model

    with megatron(case, ours=True) as installation:
        (feature,) = (f for f in installation.features if isinstance(f, vocabulary.SharedOut))
        hooks = feature.script_hooks()
        (building,) = (h.make for h in hooks if h.target.places[0].endswith(":get_model"))
        with refused(ConfigError) as error:
            building(get_model)(with_own_loss)
        (model,) = models = building(get_model)(provide)
        vocabulary.require_losses_of(models)
        model.compute_language_model_loss = None
        with refused(ConfigError) if model.post_process else contextlib.nullcontext(error):
            vocabulary.require_losses_of(models)
        shard = vocabulary.shard_of(models)
        learns = [p.requires_grad for p in (shard.embedding, shard.output)]
        said = str(error[0])
        return {"ranks": gathered((learns, bool((shard.output == 3).all()), said))}


def passes(case: dict[str, Any]) -> dict[str, Any]:
    """A forward pass of the first stage and of the last one, and what each refuses."""
    with megatron(case, ours=True):
        models = build(case)
        tp = case.get("tp", 1)
        tokens = torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE)
        positions = torch.arange(SEQUENCE).expand(2, -1)
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), diagonal=1).bool()
        embedding, hidden = ends.embedding_of(models[0]), ends.hidden_of(models)
        out: dict[str, Any] = {}
        if embedding is not None:
            with refused(RuntimeError) as error:
                models[0](tokens, positions, mask, labels=tokens)
            out["refused"] = str(error[0])
            given = torch.ones(2, SEQUENCE, HIDDEN, requires_grad=True)
            embedding.given = [given]
            found = models[0].embedding(tokens, positions)
            found.sum().backward()
            rows = SEQUENCE // tp if case.get("scatter") else SEQUENCE
            out["embedding"] = found.shape == (rows, 2, HIDDEN) and bool((found == tp).all())
            out["gradient"] = bool((given.grad == 1).all()) and not embedding.given
        if hidden is not None:
            rows = SEQUENCE // tp if case.get("scatter") else SEQUENCE
            models[0].set_input_tensor(torch.ones(rows, 2, HIDDEN))
            result = models[0](tokens, positions, mask, labels=tokens)
            out["hidden"] = tuple(result.shape) == (rows, 2, HIDDEN)
            out["labels"] = hidden.end is not None and hidden.end.labels is tokens
            with refused(ConfigError) as error:
                models[0](tokens, positions, mask)
            out["refused"] = str(error[0])
        return {"ranks": gathered(out)}


@contextlib.contextmanager
def refused(kind: type[Exception]) -> Iterator[list[Exception]]:
    """The exception that must come."""
    found: list[Exception] = []
    try:
        yield found
    except kind as error:
        found.append(error)
    assert found


def optimizer_of(models: list[GPTModel], seed: int) -> Any:
    """Megatron's distributed optimizer of its data-parallel models, with some state."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=4000)
    wrapped = [DistributedDataParallel(models[0].config, ddp, model) for model in models]
    config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, wrapped)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        one.optimizer.step()
    for model in wrapped:
        model.start_param_sync(force_sync=True)
    return optimizer


class Job:
    """A model, and an optimizer if the case has one, that can be saved and loaded."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        self.models, self.optimizer = build(case, seed), None
        count = len(self.models)
        self.names = ["model"] if count == 1 else [f"model{i}" for i in range(count)]
        if case.get("optimizer"):
            self.optimizer = optimizer_of(self.models, seed)

    def state(self, loading: bool) -> dict[str, Any]:
        """As Megatron's ``generate_state_dict``."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "chained_optim_avoid_prefix": True,
        }
        state = {
            name: model.sharded_state_dict(metadata=metadata)
            for name, model in zip(self.names, self.models)
        }
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                dict(state), is_loading=loading, metadata=metadata
            )
        return state

    def save(self, folder: Path) -> None:
        """Write ``folder``."""
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        dist_checkpointing.save(self.state(False), str(folder))

    def load(self, folder: Path) -> None:
        """Read ``folder``."""
        loaded = dist_checkpointing.load(self.state(True), str(folder))
        for name, model in zip(self.names, self.models):
            model.load_state_dict(loaded[name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(loaded["optimizer"])


def tour(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Stock saves; ours loads and saves; stock loads and saves. Each starts from other values."""
    names = ("stock", "ours", "again")
    for seed, name in enumerate(names):
        with megatron(case, ours=name == "ours"):
            job = Job(case, seed + 1)
            if seed:
                job.load(folder / names[seed - 1])
            job.save(folder / name)
            if name == "stock":
                started = wholes(job.models)
            if name == "again":
                ended = wholes(job.models)
    return {
        "folders": {name: str(folder / name) for name in names},
        "equal": started == ended,
    }


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One case on one rank."""
    if case.get("saved"):
        return tour(case, folder)
    if case.get("provider"):
        return provider(case)
    if case.get("passes"):
        return passes(case)
    return compare(case)


def rank_main(folder: Path, name: str, case: dict[str, Any], rank: int) -> None:
    """One case on one rank; rank 0 writes."""
    world = case.get("world", PP)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = run(case, folder)
    if rank == 0:
        (folder / "result.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    serve(CASES, rank_main, PP)
