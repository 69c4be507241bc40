"""Each framework's own training step, imported from its checkout, on a tiny GPT.

A driver gives the step what its trainer gives it (arguments, batches, optimizer) and returns what
the step returns. Packages that the step does not use are stubbed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.campaigns.trainers.model import LENGTHS, LONGEST, Tiny, sequences
from tests.campaigns.trainers.stubs import Anything, bare, stub

SCHEDULER = SimpleNamespace(step=lambda increment: None)


class Driver:
    """Runs steps of a framework.

    Args:
        tiny: the model.

    Attributes:
        options: what ``Tiny`` needs beside its defaults.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny

    def step(self, number: int) -> Any:
        """Train on one batch, then run a forward pass where the framework has one; what both
        return on this rank."""
        raise NotImplementedError

    def per_chunk(self, make: Any) -> Any:
        """An iterator, or one for each chunk."""
        models = self.tiny.models
        return [make() for _ in models] if len(models) > 1 else make()


STUBS = {
    "verl": "ray transformers tqdm peft accelerate pandas datasets wandb torchdata pyarrow dill "
    "torchvision PIL qwen_vl_utils mbridge requests codetiming",
    "RL": "ray transformers nccl tqdm datasets zmq megatron.bridge requests PIL torchvision decord "
    "huggingface_hub rich pynvml mlflow",
    "ms-swift": "transformers accelerate modelscope mcore_bridge peft tqdm datasets trl requests "
    "PIL urllib3 safetensors huggingface_hub json_repair pandas",
    "Megatron-Bridge": "modelopt transformers tqdm wandb nvidia_resiliency_ext mlflow datasets "
    "requests nvdlfw_inspect comet_ml rich",
}
# Parts of a framework itself, or of torch, that import much more and take no part in a step.
NOT_USED = {
    "RL": "nemo_rl.models.generation nemo_rl.utils.logger",
    "ms-swift": "swift.dataset swift.template swift.trainers swift.tuners swift.dataloader "
    "swift.rlhf_trainers swift.model swift.megatron.model swift.megatron.callbacks",
    "Megatron-Bridge": "megatron.bridge.models megatron.bridge.peft torch.utils.tensorboard "
    "megatron.bridge.training.checkpointing megatron.bridge.training.config "
    "megatron.bridge.data.datasets",
}
# Imported before megatron_ext is enabled, as in a worker of the framework.
MODULES = {
    "verl": "verl.workers.engine.megatron.transformer_impl",
    "RL": "nemo_rl.models.megatron.train",
    "ms-swift": "swift.megatron.trainers.trainer",
    "Megatron-Bridge": "megatron.bridge.training.gpt_step",
}
BARE = {"Megatron-Bridge": "megatron.bridge megatron.bridge.training megatron.bridge.data"}


def prepare(framework: str, checkout: Path) -> None:
    """Import the framework; ``checkout`` is on ``sys.path``."""
    stub(STUBS[framework].split(), instead=NOT_USED.get(framework, "").split())
    for package in BARE.get(framework, "").split():
        bare(package, checkout / package.replace(".", "/"))
    importlib.import_module(MODULES[framework])


class Verl(Driver):
    """``MegatronEngineWithLMHead.train_batch`` with its SFT loss, then ``infer_batch``."""

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(tiny)
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
        from verl.workers.utils.losses import sft_loss

        self._engine = engine = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
        engine.engine_config = SimpleNamespace(
            context_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            dynamic_context_parallel=False,
            pad_bshd_to_minibatch_max=False,
            use_remove_padding=True,
            use_fused_kernels=False,
            pad_to_length=False,
            entropy_from_logits_with_chunking=False,
            router_replay=SimpleNamespace(mode="disabled"),
        )
        engine.model_config = SimpleNamespace(
            model_type="language_model",
            mtp=SimpleNamespace(enable=False, enable_train=False),
            hf_config=SimpleNamespace(architectures=["Tiny"]),
            tokenizer=SimpleNamespace(pad_token_id=0),
        )
        engine.tf_config, engine.module, engine.optimizer = (
            tiny.config,
            tiny.models,
            tiny.optimizer,
        )
        engine.enable_routing_replay = False
        self._loss = functools.partial(sft_loss, None)

    def step(self, number: int) -> Any:
        trained = self._engine.train_batch(self._batch(number), self._loss)
        trained.get("metrics", {}).pop("grad_norm", None)  # its last bits depend on the placement
        return trained, self._engine.infer_batch(self._batch(number))

    def _batch(self, number: int) -> Any:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        tokens = sequences(number)
        nested = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
        mask = torch.nested.nested_tensor_from_jagged(
            torch.ones(len(nested.values()), dtype=torch.int64), nested.offsets()
        )
        data = TensorDict(
            {"input_ids": nested, "loss_mask": mask, "temperature": torch.ones(len(tokens))},
            [len(tokens)],
        )
        tu.assign_non_tensor(
            data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, calculate_entropy=True
        )
        return data


class NemoRL(Driver):
    """``megatron_forward_backward`` with the loss of SFT, then with the log-probabilities."""

    options: ClassVar[dict[str, Any]] = {"variable_seq_lengths": True}

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(tiny)
        from nemo_rl.algorithms.loss import NLLLossFn
        from nemo_rl.models.megatron.train import LogprobsPostProcessor, LossPostProcessor

        cfg = {"sequence_packing": {"enabled": False}}
        self._loss = LossPostProcessor(NLLLossFn(), cfg, num_microbatches=len(LENGTHS))
        self._logprobs = LogprobsPostProcessor(cfg)

    def step(self, number: int) -> Any:
        for model in self.tiny.models:
            model.zero_grad_buffer()
        self.tiny.optimizer.zero_grad()
        losses = self._run(number, self._loss, False)
        self.tiny.optimizer.step()
        with torch.no_grad():
            return losses, self._run(number, self._logprobs, True)

    def _run(self, number: int, post_processing: Any, forward_only: bool) -> Any:
        from nemo_rl.models.megatron.train import megatron_forward_backward

        return megatron_forward_backward(
            model=self.tiny.models if len(self.tiny.models) > 1 else self.tiny.models[0],
            data_iterator=self.per_chunk(lambda: iter(self._batches(number))),
            num_microbatches=len(LENGTHS),
            seq_length=LONGEST,
            mbs=1,
            post_processing_fn=post_processing,
            forward_only=forward_only,
            global_valid_seqs=torch.tensor(len(LENGTHS)),
            global_valid_toks=torch.tensor(sum(LENGTHS)),
            straggler_timer=None,
        )

    @staticmethod
    def _batches(number: int) -> Any:
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict
        from nemo_rl.models.megatron.data import ProcessedMicrobatch

        for tokens in sequences(number):
            ids = tokens[None]
            data = BatchedDataDict(
                input_ids=ids,
                input_lengths=torch.tensor([len(tokens)]),
                token_mask=torch.ones_like(ids),
                sample_mask=torch.ones(1),
            )
            positions = torch.arange(len(tokens))[None]
            yield ProcessedMicrobatch(data, ids, ids, None, positions, None, None)


class Swift(Driver):
    """``MegatronTrainer.train_step`` with its SFT loss in bf16, and one pass of ``evaluate``."""

    options: ClassVar[dict[str, Any]] = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(tiny)
        from swift.megatron.trainers.trainer import MegatronTrainer

        self._trainer = trainer = MegatronTrainer.__new__(MegatronTrainer)
        trainer.args = SimpleNamespace(
            task_type="causal_lm",
            pipeline_model_parallel_size=tiny.config.pipeline_model_parallel_size,
            context_parallel_size=1,
            num_microbatches=len(LENGTHS),
            global_batch_size=len(LENGTHS),
            micro_batch_size=1,
            seq_length=LONGEST,
            padding_free=False,
            enable_dft_loss=False,
            enable_channel_loss=False,
            eval_iters=1,
            is_multimodal=False,
            sequence_parallel=False,
        )
        trainer.wrapped_models, trainer.optimizer = tiny.models, tiny.optimizer
        trainer.opt_param_scheduler, trainer.enable_routing_replay = SCHEDULER, False
        trainer.config, trainer.callbacks, trainer.eval_metrics = tiny.config, [], None
        trainer.on_log = lambda logs, prefix: None

    def step(self, number: int) -> Any:
        metrics, _, successful = self._trainer.train_step(
            self.per_chunk(lambda: self._batches(number))
        )
        evaluated = self._trainer.evaluate(self.per_chunk(lambda: self._batches(number)))
        for model in self.tiny.models:
            model.train()
        return metrics, successful, evaluated

    @staticmethod
    def _batches(number: int) -> Any:
        for tokens in sequences(number):
            positions = torch.arange(len(tokens))[None]
            ids = tokens[None]
            yield {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


class Bridge(Driver):
    """``train_step`` of recipes with the forward step of GPT models."""

    options: ClassVar[dict[str, Any]] = {"variable_seq_lengths": False}

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(tiny)
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.core import num_microbatches_calculator, rerun_state_machine
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection

        m = len(LENGTHS)
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, m, 1, 1)
        rerun_state_machine.initialize_rerun_state_machine(
            mode=rerun_state_machine.RerunMode.DISABLED
        )
        tiny.config.seq_length = LONGEST
        model = SimpleNamespace(
            seq_length=LONGEST,
            virtual_pipeline_model_parallel_size=(tiny.config.virtual_pipeline_model_parallel_size),
            pipeline_model_parallel_layout=tiny.config.pipeline_model_parallel_layout,
        )
        cfg = SimpleNamespace(
            model=model,
            train=SimpleNamespace(
                micro_batch_size=1,
                empty_unused_memory_level=0,
                check_optimizer_step_success=True,
                skip_sync_grad_norm_across_mp=False,
            ),
            optimizer=SimpleNamespace(
                reuse_grad_buf_for_mxfp8_param_ag=False,
                barrier_with_L1_time=False,
                log_num_zeros_in_grad=False,
            ),
            ddp=SimpleNamespace(overlap_param_gather=False),
            dataset=SimpleNamespace(dataloader_type="single"),
            # Else it asks modelopt, which is stubbed, whether this is a distillation.
            dist=SimpleNamespace(use_decentralized_pg=True),
            rerun_state_machine=SimpleNamespace(
                check_for_nan_in_loss=False, check_for_spiky_loss=False
            ),
            data_parallel_size=1,
        )
        self._state = SimpleNamespace(
            cfg=cfg, timers=lambda *args, **kwargs: Anything(), straggler_timer=_Timer()
        )
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        for part in tiny.bare:
            part.pg_collection = self._groups
        self._communicator = P2PCommunicator(pp_group=self._groups.pp, config=tiny.config)
        self._forward_step = functools.partial(forward_step, self._state)

    def step(self, number: int) -> Any:
        from megatron.bridge.training.train import train_step
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        size = self.tiny.config.virtual_pipeline_model_parallel_size
        function = get_forward_backward_func(pp_size=self._groups.pp.size(), vp_size=size)
        return train_step(
            self._forward_step,
            self._batches(number),
            self.tiny.models,
            self.tiny.optimizer,
            SCHEDULER,
            self._state,
            self._groups,
            function,
            self._communicator,
        )[0]

    @staticmethod
    def _batches(number: int) -> Any:
        for tokens in sequences(number):
            rest = LONGEST + 1 - len(tokens)
            padded = torch.nn.functional.pad(tokens, (0, rest))
            mask = torch.nn.functional.pad(torch.ones(len(tokens) - 1), (0, rest))
            yield {
                "tokens": padded[None, :-1],
                "labels": padded[None, 1:],
                "loss_mask": mask[None],
                "position_ids": torch.arange(LONGEST)[None],
            }


class _Timer(contextlib.nullcontext[None]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


DRIVERS: dict[str, type[Driver]] = {
    "verl": Verl,
    "RL": NemoRL,
    "ms-swift": Swift,
    "Megatron-Bridge": Bridge,
}
