"""Errors put into a copy of Megatron, one at a time: does ``prove`` find and name them?

    python3 -m tests.campaigns.prove_mutations [--only NAME]

The texts are those of Megatron 0.19.0. An error counts as named if the first difference that is
reported mentions one of the words that stand with it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from megatron_ext.prove.server import ScriptServer
from megatron_ext.prove.session import Session
from megatron_ext.prove.shrink import Shrinker
from tests.support.checkouts import checkout

TAG = "core_v0.19.0"
_MODEL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
--seq-length 4096 --max-position-embeddings 4096 --swiglu --position-embedding-type rope
--normalization RMSNorm --micro-batch-size 1 --global-batch-size 64 --bf16"""
_UNTIED = "--untie-embeddings-and-output-weights"
_PP = "--pipeline-model-parallel-size 2"
_TP = "--tensor-model-parallel-size 2"
_SP = f"{_TP} --sequence-parallel"
_CP = "--context-parallel-size 2"
_OPTIMIZER = "--use-distributed-optimizer"
_OVERLAP = f"{_OPTIMIZER} --overlap-grad-reduce --overlap-param-gather"
_MOE = """--num-experts 8 --expert-model-parallel-size 2 --moe-router-topk 2
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.1 --disable-bias-linear"""
_VPP = "--num-layers-per-virtual-pipeline-stage 4"


class Mutation(NamedTuple):
    """An error.

    Attributes:
        name: of it.
        file: below ``megatron/``.
        old: text there, its first occurrence after ``anchor``.
        new: what takes its place.
        flags: of a layout that it breaks.
        words: one of them has to stand in the first difference.
        anchor: text before ``old``.
    """

    name: str
    file: str
    old: str
    new: str
    flags: str = ""
    words: tuple[str, ...] = ()
    anchor: str = ""


_FINALIZE = "core/distributed/finalize_model_grads.py"
_BUFFER = "core/distributed/param_and_grad_buffer.py"
_LAYERS = "core/tensor_parallel/layers.py"
_MAPPINGS = "core/tensor_parallel/mappings.py"
_ENTROPY = "core/tensor_parallel/cross_entropy.py"
_SCHEDULES = "core/pipeline_parallel/schedules.py"
_P2P = "core/pipeline_parallel/p2p_communication.py"
_MOE_FILES = "core/transformer/moe"

MUTATIONS = (
    Mutation("reduction of norm gradients over TP dropped", _FINALIZE,
             "torch.distributed.all_reduce(coalesced, op=all_reduce_op, group=tp_group)", "pass",
             f"{_PP} {_SP} {_UNTIED}", ("TP",)),
    Mutation("reduction of the tied embedding's gradient dropped", _FINALIZE,
             "torch.distributed.all_reduce(grad, group=embd_group)", "pass",
             _PP, ("embedding",)),
    Mutation("data-parallel mean applied twice", _BUFFER,
             "bucket.grad_data *= bucket.gradient_scaling_factor",
             "bucket.grad_data *= bucket.gradient_scaling_factor ** 2",
             f"{_PP} {_UNTIED} --world-size 4", ("DP ranks",)),
    Mutation("experts' gradients scaled by the ranks of experts", _BUFFER,
             "bucket.grad_data *= bucket.gradient_scaling_factor",
             "bucket.grad_data *= bucket.gradient_scaling_factor * (1 if self."
             "data_parallel_group.size() > 1 else torch.distributed.get_world_size() ** 0.5)",
             f"{_PP} {_UNTIED} {_MOE}", ("expert", "DP ranks")),
    Mutation("layer offset of a stage one too low", "core/transformer/transformer_layer.py",
             "offset = pp_rank * num_layers_per_pipeline_rank",
             "offset = max(0, pp_rank * num_layers_per_pipeline_rank - 1)",
             f"{_PP} {_UNTIED}", ("layer", "no rank", "failed")),
    Mutation("layer offset of a virtual stage wrong", "core/transformer/transformer_layer.py",
             "offset = vp_stage * total_virtual_chunks + (pp_rank * num_layers_per_virtual_rank)",
             "offset = (pp_rank * vp_size + vp_stage) * num_layers_per_virtual_rank",
             f"{_PP} {_VPP} {_UNTIED}", ("layer",)),
    Mutation("sum of exponents not reduced over the vocabulary", _ENTROPY,
             "sum_exp_logits, op=torch.distributed.ReduceOp.SUM, group=tp_group",
             "sum_exp_logits.clone(), op=torch.distributed.ReduceOp.SUM, group=tp_group",
             f"{_TP} {_UNTIED}", ("loss",)),
    Mutation("row-parallel output not reduced", _LAYERS,
             "output_ = reduce_from_tensor_model_parallel_region("
             "output_parallel, group=self.tp_group)",
             "output_ = output_parallel",
             f"{_PP} {_TP} {_UNTIED}", ("layer 1", "embedding")),
    Mutation("gradient of a column-parallel input not reduced", _LAYERS,
             "handle = torch.distributed.all_reduce(grad_input, group=tp_group, async_op=True)",
             "handle = torch.distributed.all_reduce("
             "grad_input.clone(), group=tp_group, async_op=True)",
             f"{_PP} {_TP} {_UNTIED}", ("gradient", "layer")),
    Mutation("sequence-parallel gather's gradient split, not summed", _MAPPINGS,
             "_gather_along_first_dim(grad_output, ctx.group, input_split_sizes, "
             "use_global_buffer)",
             "_gather_along_first_dim(grad_output * 2, ctx.group, input_split_sizes, "
             "use_global_buffer)",
             f"{_PP} {_SP} {_UNTIED}", ("gradient", "layer"),
             "class _ReduceScatterToSequenceParallelRegion"),
    Mutation("rotary angles of the next context-parallel rank",
             "core/models/common/embeddings/rope_utils.py",
             "[cp_rank, (2 * cp_size - cp_rank - 1)]",
             "[(cp_rank + 1) % cp_size, (2 * cp_size - cp_rank - 1)]",
             f"{_PP} {_CP} {_UNTIED}", ("layer 1",)),
    Mutation("tokens counted per context-parallel rank", _FINALIZE,
             "torch.distributed.all_reduce(num_tokens, group=dp_cp_group)", "pass",
             f"{_PP} {_CP} {_UNTIED} --calculate-per-token-loss", ("gradient",)),
    Mutation("loss divided by one microbatch too few", _SCHEDULES,
             "output_tensor /= num_microbatches", "output_tensor /= max(1, num_microbatches - 1)",
             f"{_PP} {_UNTIED} --use-tp-pp-dp-mapping", ("gradient",)),
    Mutation("samples of data-parallel rank 0 on all ranks", "training/datasets/data_samplers.py",
             "start_idx = self.data_parallel_rank * self.micro_batch_size", "start_idx = 0",
             f"{_PP} {_UNTIED}", ("samples", "tokens")),
    Mutation("experts numbered from the wrong rank", f"{_MOE_FILES}/experts.py",
             "local_expert_indices_offset = self.ep_group.rank() * self.num_local_experts",
             "local_expert_indices_offset = (self.ep_group.size() - 1 - self.ep_group.rank())"
             " * self.num_local_experts",
             f"{_PP} {_UNTIED} {_MOE}", ("layer", "expert"), "class SequentialMLP"),
    Mutation("probabilities sent with exchanged splits", f"{_MOE_FILES}/token_dispatcher.py",
             "permuted_probs,",
             "permuted_probs if self.ep_size == 1 else torch.flip(permuted_probs, (0,)),",
             f"{_PP} {_UNTIED} {_MOE}", ("layer",), "global_probs = all_to_all("),
    Mutation("auxiliary loss scaled by the number of microbatches once more", _SCHEDULES,
             "MoEAuxLossAutoScaler.set_loss_scale("
             "loss_scale * cp_size_for_scaling / num_microbatches)",
             "MoEAuxLossAutoScaler.set_loss_scale(loss_scale)",
             f"{_PP} {_UNTIED} {_MOE}", ("layer", "gradient")),
    Mutation("counts for the router's bias not reduced", f"{_MOE_FILES}/moe_utils.py",
             "torch.distributed.all_reduce(tokens_per_expert, group=tp_dp_cp_group)", "pass",
             f"{_PP} {_UNTIED} {_MOE} --moe-router-score-function sigmoid "
             "--moe-router-enable-expert-bias", ("bias",)),
    Mutation("duplicates counted in the gradient's norm", _LAYERS,
             "return tp_group.rank() == 0", "return True",
             f"{_PP} {_TP} {_UNTIED} --clip-grad 0.1", ("norm", "weight")),
    Mutation("clipping coefficient squared", "core/optimizer/clip_grads.py",
             "clip_coeff = max_norm / (total_norm + 1.0e-6)",
             "clip_coeff = (max_norm / (total_norm + 1.0e-6)) ** torch.distributed."
             "get_world_size() ** 0.5",
             f"{_PP} {_UNTIED} --clip-grad 0.1", ("weight", "exp_avg")),
    Mutation("updated parameters not gathered", "core/optimizer/distrib_optimizer.py",
             "self.start_param_sync_for_bucket_group_subset()", "pass",
             f"{_PP} {_UNTIED} {_OPTIMIZER}", ("weight",), "def step_with_ready_grads"),
    Mutation("tied gradient added twice", _FINALIZE,
             "torch.distributed.all_reduce(grad, group=embd_group)",
             "torch.distributed.all_reduce(grad, group=embd_group); grad *= embd_group.size()",
             _PP, ("2 PP ranks",)),
    Mutation("gradient of the message before", _P2P,
             "output_tensor_grads.append(output_tensor_grad)",
             "output_tensor_grads.append(getattr(self, '_last', None) if getattr("
             "self, '_last', None) is not None else output_tensor_grad); "
             "self._last = output_tensor_grad",
             f"{_PP} {_UNTIED}", ("microbatch", "gradient"), "def send_forward_recv_backward"),
    Mutation("activation sent twice as large", _P2P,
             "tensor_send_next=output_tensor,", "tensor_send_next=output_tensor * 2,",
             f"{_PP} {_UNTIED}", ("layer",), "def send_forward_recv_backward"),
    Mutation("messages read before they have arrived", _P2P,
             "req.wait()", "pass",
             f"{_PP} {_UNTIED}", ("not a number", "message"),
             "if wait_on_reqs and len(reqs) > 0:"),
)  # fmt: skip


def inject(tree: Path, mutation: Mutation) -> str:
    """Put an error into a copy of Megatron; returns the file's text before.

    Raises:
        ValueError: this Megatron has another text.
    """
    file = tree / "megatron" / mutation.file
    text = file.read_text()
    start = text.find(mutation.anchor)
    at = text.find(mutation.old, start) if start >= 0 else -1
    if at < 0:
        raise ValueError(f"{mutation.file} has no {mutation.old!r}")
    file.write_text(text[:at] + mutation.new + text[at + len(mutation.old) :])
    return text


def copy(stock: Path, tree: Path) -> None:
    """A copy of what the training script imports."""
    shutil.copytree(stock / "megatron", tree / "megatron", dirs_exist_ok=True)
    for script in stock.glob("*.py"):
        shutil.copy(script, tree)


def judge(tree: Path, mutation: Mutation, folder: Path) -> tuple[str, str]:
    """(``named``, ``found`` or ``MISSED``, what was reported) of one error."""
    words = f"{_MODEL} {mutation.flags}".split()
    world = 0
    if "--world-size" in words:
        at = words.index("--world-size")
        world = int(words[at + 1])
        del words[at : at + 2]
    shrunk = Shrinker(words, world).shrink()
    with ScriptServer(tree / "pretrain_gpt.py", double=True) as server:
        check = Session(server, shrunk, folder).check("layout", shrunk.stock)
    if check.status == "equal":
        return "MISSED", ""
    text = check.detail or (check.comparison.differences[0].text if check.comparison else "")
    text = f"{check.status}: {text}" if check.status != "different" else text
    return ("named" if any(word in text for word in mutation.words) else "found"), text


def main() -> int:
    """Judge all errors, or one; the exit status says whether at least 18 are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    stock = checkout(TAG)
    if stock is None:
        print("needs Megatron 0.19.0: scripts/get_megatron.sh " + TAG, file=sys.stderr)
        return 2
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        tree = Path(scratch) / "tree"
        copy(stock, tree)
        for mutation in MUTATIONS:
            if options.only not in mutation.name:
                continue
            start = time.monotonic()
            before = inject(tree, mutation)
            verdict, text = judge(tree, mutation, Path(scratch) / "runs")
            (tree / "megatron" / mutation.file).write_text(before)
            verdicts.append(verdict)
            seconds = time.monotonic() - start
            print(f"{verdict:7} {seconds:4.0f} s  {mutation.name}\n        {text}", flush=True)
            shutil.rmtree(Path(scratch) / "runs", ignore_errors=True)
    named, found = verdicts.count("named"), len(verdicts) - verdicts.count("MISSED")
    print(f"{found} of {len(verdicts)} found, {named} named")
    return 0 if options.only or named >= 18 else 1


if __name__ == "__main__":
    sys.exit(main())
