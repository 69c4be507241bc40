"""Features that ``random_equivalence --wide`` adds to a drawn case, with what they go with."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tests.support.architectures import MASKED, MLA, PACKED

_SUM = "two summands of a gradient are added in another order"
_SHARDS = "sums over the vocabulary are sums over its shards"
_ORDER = "microbatches are added in another order"
_SLICED = "--pp-slice"
_NO_DOCUMENTS = rf"dataloader-inter-document|reset-position-ids|context-parallel|{_SLICED}"
_PLAIN_ATTENTION = r"multi-latent|window-size|softmax-type|qk-layernorm|output-gate|kv-channels"


@dataclass(frozen=True)
class Extra:
    """Flags that a case may get.

    Attributes:
        model: they make the starting checkpoint, too.
        run: of both runs.
        ours: of the schedule's run.
        needs, without: patterns that the case's flags have, or have not.
        why: losses are equal within a tolerance only; empty: bit for bit.
    """

    model: str = ""
    run: str = ""
    ours: str = ""
    needs: str = ""
    without: str = r"^$"
    why: str = ""

    def fits(self, flags: str) -> bool:
        """Whether a case with these flags may get it."""
        flags = " ".join(flags.split())
        return bool(re.search(self.needs, flags)) and not re.search(self.without, flags)

    @property
    def names(self) -> set[str]:
        """Its flags, without their values."""
        return set(re.findall(r"--[a-z][\w-]*", f"{self.model} {self.run} {self.ours}"))


_EXPERTS = "--num-experts"

EXTRAS = (
    # Attention and MLP.
    Extra(model="--qk-layernorm", without=_PLAIN_ATTENTION),
    Extra(model="--kv-channels 16", without=_PLAIN_ATTENTION),
    Extra(model="--attention-output-gate", without=_PLAIN_ATTENTION),
    Extra(
        model="--window-size 4,0 --window-attn-skip-freq 2",
        without=f"{_PLAIN_ATTENTION}|inter-document|context-parallel",
    ),
    Extra(model="--softmax-type learnable", without=f"{_PLAIN_ATTENTION}|context-parallel"),
    Extra(model="--softmax-type off-by-one", without=f"{_PLAIN_ATTENTION}|context-parallel"),
    Extra(model=MLA, without=f"{_PLAIN_ATTENTION}|query-groups|context-parallel"),
    Extra(model="--add-qkv-bias --disable-bias-linear", without="multi-latent"),
    Extra(model="--squared-relu", without="--swiglu"),
    Extra(model="--rotary-percent 0.5", needs="type rope", without="multi-latent"),
    Extra(model="--rotary-interleaved", needs="type rope", without="multi-latent"),
    Extra(model="--use-rope-scaling", needs="type rope", without="multi-latent"),
    Extra(model="--make-vocab-size-divisible-by 8"),
    # Experts.
    *(
        Extra(model=model, needs=_EXPERTS)
        for model in (
            "--moe-router-load-balancing-type seq_aux_loss",
            "--moe-router-load-balancing-type global_aux_loss",
            "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-aux-loss-coeff 0",
            "--moe-router-load-balancing-type none",
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5",
            "--moe-shared-expert-intermediate-size 32",
            "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
            "--moe-expert-capacity-factor 1.0",
            "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
            "--moe-expert-capacity-factor 0.5 --moe-token-drop-policy position",
            "--moe-router-num-groups 2 --moe-router-group-topk 1",
            "--moe-router-dtype fp64",
            "--moe-router-pre-softmax",
            "--moe-token-dispatcher-type allgather",
            "--moe-layer-freq 2",
            "--moe-ffn-hidden-size 48",
        )
    ),
    # Optimizer, gradients, the loop around the steps.
    Extra(run="--optimizer sgd", without="distributed-opt"),
    Extra(run="--weight-decay 0.1 --decoupled-lr 1e-4"),
    Extra(run="--lr-warmup-iters 1"),
    Extra(run="--log-params-norm --log-num-zeros-in-grad --timing-log-level 1"),
    Extra(run="--rerun-mode validate_results"),
    Extra(run="--manual-gc --manual-gc-interval 1"),
    Extra(run="--train-sync-interval 1"),
    Extra(
        run="--iterations-to-skip 2",
        # Megatron's script draws data for one chunk a rank, on the first and the last rank.
        needs="pipeline-model-parallel-size 2.*--pp-schedule (1f1b|zb)",
    ),
    Extra(run="--grad-reduce-in-bf16", needs="--bf16"),
    Extra(run="--ddp-average-in-collective", needs="distributed-opt", without="per-token"),
    Extra(
        run="--num-distributed-optimizer-instances 2",
        needs="--use-distributed-optimizer",
        without="optimizer-cpu|expert-model",
    ),
    Extra(
        run="--use-precision-aware-optimizer --optimizer-cpu-offload",
        needs="--bf16.*--use-distributed-optimizer",
    ),
    Extra(run="--eval-iters 2 --eval-interval 2", without="--eval-iters"),
    Extra(run="--save SAVE --save-interval 2"),
    Extra(run="--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
    Extra(run="--attention-softmax-in-fp32"),
    *(
        Extra(
            run=f"--recompute-granularity selective --recompute-modules {modules}",
            needs=needs,
            without="--recompute|--pp-cheap",
        )
        for modules, needs in (
            ("core_attn layernorm", ""),
            ("mlp", "--disable-bias-linear"),
            ("moe", _EXPERTS),
            ("shared_experts", "--moe-shared-expert"),
            ("mla_up_proj", "--multi-latent"),
        )
    ),
    # Documents; stages between the first and the last have no mask in stock, so that stock's
    # interleaving trains other than its 1F1B.
    Extra(
        model=PACKED,
        needs="pipeline-model-parallel-size 2.*micro-batch-size 1",
        without=f"{_NO_DOCUMENTS}|--window-size|--mtp",
    ),
    Extra(
        model=MASKED,
        needs="pipeline-model-parallel-size 2",
        without=f"{_NO_DOCUMENTS}|--pp-schedule (interleaved|gis|po|auto)",
    ),
    # Ours.
    # Three ranks have a vocabulary of other padding, and padding takes part in the loss.
    Extra(model="--make-vocab-size-divisible-by 384", ours="--pp-vocab-parallel", why=_SHARDS),
    Extra(
        ours="--overlap-moe-expert-parallel-comm",
        needs="--bf16.*--expert-model-parallel-size",
        without="--pp-offload|--moe-pipeline|allgather|--recompute|--pp-slice",
    ),
    Extra(ours="--pp-microbatch-costs lengths", needs="inter-document", without="--pp-cost"),
    Extra(
        ours="--pp-microbatch-costs lengths --pp-reorder-microbatches",
        needs="inter-document",
        without="--pp-cost",
        why=_ORDER,
    ),
    Extra(ours="--pp-p2p pipeline"),
    Extra(ours="--pp-trace TRACE"),
    Extra(ours="--pp-slice-weights joined", needs="--pp-slices", why=_SUM),
    Extra(ours="--pp-offload-policy keep-attention-inputs", needs="--pp-offload"),
    Extra(ours="--pp-offload-chunks 1", without="--pp-offload"),
)


def extras(rng: random.Random, flags: str) -> list[Extra]:
    """Two to six of ``EXTRAS`` that go with ``flags`` and with each other."""
    found: list[Extra] = []
    for _ in range(rng.randint(2, 6)):
        taken = {name for extra in found for name in extra.names}
        fitting = [e for e in EXTRAS if e.fits(flags) and not e.names & taken]
        # Three times as likely what few cases may have.
        [extra] = rng.choices(fitting, [3 if extra.needs else 1 for extra in fitting])
        found.append(extra)
        flags += f" {extra.model} {extra.run} {extra.ours}"
    return found
