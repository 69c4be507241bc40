"""A training command for a thousand GPUs, made small enough for CPU ranks.

Everything that decides *how* something is computed stays: parallel sizes as far as the ranks
reach, schedule, dispatcher, recompute, kinds of layers. Sizes are appended to the line, where
Megatron's parser takes the last; what CPU ranks cannot run is taken off it and listed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..plan.layout import expanded
from ..plan.pattern import listed
from .flags import Flags

MOST_RANKS = 16
STEPS = 2
TP, PP, CP, EP = (
    f"--{name}-parallel-size"
    for name in ("tensor-model", "pipeline-model", "context", "expert-model")
)
_ETP = "--expert-tensor-parallel-size"
_INSTANCES = "--num-distributed-optimizer-instances"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_PER_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_LAYOUT = "--pipeline-model-parallel-layout"
_DIVISIBLE = "--make-vocab-size-divisible-by"
_HEAD = 8  # elements of a head
_VOCABULARY = 64  # tokens a tensor-parallel rank

# Beginnings of flags that divide or order the work: one process has none of them.
DIVIDING = """--tensor-model-parallel --pipeline-model-parallel --context-parallel
    --hierarchical-context --hybrid-context --cp-comm-type --expert-model-parallel
    --expert-tensor-parallel --num-layers-per-virtual --num-virtual-stages
    --microbatch-group --decoder-first-pipeline
    --decoder-last-pipeline --account-for- --standalone-embedding --sequence-parallel
    --use-distributed-optimizer --num-distributed-optimizer --overlap- --no-overlap- --no-align-
    --disable-align- --ddp- --delay-wgrad --no-async-tensor --disable-async-tensor
    --use-tp-pp-dp-mapping --recompute- --distribute-saved --mtp-use-repeated --create-all-gather
    --tensor-parallel-num-weight --outer-dp --max-seqlen-per-dp-cp --pp- --moe-pipeline-
    --moe-memory-reuse"""
OURS = "--pp- --moe-pipeline- --moe-memory-reuse"
_OUTSIDE = """--save --load --data-path --data-args --data-cache
    --data-parallel-random --train- --valid- --test- --tokenizer --vocab-file
    --merge-file --tiktoken --split --mock-data --num-workers
    --dataloader-type --distributed- --ckpt- --async- --use-dist-ckpt --dist-ckpt --use-persistent
    --use-checkpoint --auto-detect-ckpt --non-persistent --replication --log- --tensorboard --wandb
    --profile --timing --memory-snapshot --record-memory --exit- --eval- --finetune --pretrained-
    --no-save --no-load --lr- --min-lr --rampup --step-batch --decrease-batch --start-weight
    --end-weight --weight-decay-incr --check-for --no-check-for --rerun --result- --one-logger
    --enable-one-logger --no-one-logger --app-tag --straggler --disable-straggler --logging-level
    --inprocess --enable-ft --ft- --calc-ft --otel --adlr- --nvtx --pytorch-profiler
    --use-pytorch-profiler --record-shapes --per-split --per-dataset --full-validation
    --multiple-validation --validation-set --verify-integrity --seed --adam-eps --te-rng --nccl-
    --high-priority --use-mp-args --override- --skip-train --iterations-to-skip --config-logger
    --flight-recorder --barrier-with --no-create-attention --no-mmap --deterministic"""
# Reason -> beginnings of flags that are not kept and listed.
NOT_KEPT = {
    "needs a GPU": """--transformer-impl --use-flash-attn --attention-backend --tp-comm-
        --disable-tp-comm --cuda-graph --enable-cuda-graph --external-cuda --moe-grouped-gemm
        --moe-use-legacy-grouped --moe-permute-fusion --moe-router-fusion --moe-enable-deepep
        --moe-flex --moe-deepep --moe-hybridep --cross-entropy --use-nccl-ub --use-sharp
        --use-fused --apply-rope-fusion --mla-down-proj-fusion --fine-grained --offload-
        --cpu-offloading --optimizer-cpu-offload --optimizer-offload --use-precision-aware
        --moe-use-device --moe-apply-probs --batch-invariant --use-transformer-engine
        --gradient-accumulation-fusion --use-te- --moe-shared-expert-overlap --fused-
        --bias- --apply-layernorm-1p --defer-embedding --wgrad-deferral --cp-comm-type
        --activation-offload --nvfp4 --symmetric- --use-ring-exchange --kitchen- --use-kitchen""",
    "runs are in float64": """--bf16 --fp16 --fp8- --fp4- --first-last-layers-bf16
        --num-layers-at- --main-grads --main-params --exp-avg --accumulate-allreduce
        --attention-softmax-in-fp32 --apply-query-key --loss-scale --initial-loss-scale
        --min-loss-scale --hysteresis --grad-reduce-in-bf16 --moe-router-dtype --fp32-residual
        --te-precision --keep-fp8 --moe-router-padding --params-dtype --reuse-grad-buf
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute""",
    "depends on the layout by design": """--moe-expert-capacity --moe-pad-expert-input
        --moe-token-drop --moe-input-jitter --attention-dropout --hidden-dropout --muon-""",
    "small runs have none": """--hierarchical-context --window-size --original-max-position
        --overlap-param-gather-with-optimizer-step --decoder-seq-length
        --pp-reorder-microbatches""",
}
# A value -> what runs in its place, and why.
_REPLACED = (
    ("--moe-token-dispatcher-type", "flex", "alltoall", "needs a GPU"),
    ("--moe-router-load-balancing-type", "global_aux_loss", "aux_loss", "counts earlier batches"),
    ("--moe-router-load-balancing-type", "sinkhorn", "none", "balances each rank's own tokens"),
    ("--optimizer", "muon", "adam", "orthogonalizes each rank's part of a weight"),
    ("--optimizer", "dist_muon", "adam", "orthogonalizes each rank's part of a weight"),
)
# Data, a constant learning rate, no rounding that Adam makes large.
_COMPARED = """--lr 1e-3 --lr-decay-style constant --adam-eps 1e-4 --attention-dropout 0
--hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --split 95,5,0 --eval-iters 0
--eval-interval 1000000 --log-interval 1 --seed 1234 --ckpt-format torch_dist
--no-check-for-nan-in-loss-and-grad --rerun-mode disabled"""
# The most that a number may be in a small run, and what other sizes become.
_MOST = {
    **{TP: 2, PP: 4, CP: 2, EP: 2, _ETP: 2, _INSTANCES: 2},
    **{"--micro-batch-size": 2, "--recompute-num-layers": 1, "--mtp-num-layers": 2},
    **{"--moe-router-topk": 2, "--moe-router-num-groups": 2, "--moe-router-group-topk": 1},
    "--pp-slices": 4,
}
_SMALL = {
    "head": "--kv-channels --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mamba-head-dim "
    "--mamba-state-dim --linear-key-head-dim --linear-value-head-dim",
    "half": "--q-lora-rank --kv-lora-rank --moe-latent-size",
    "hidden": "--moe-ffn-hidden-size --moe-shared-expert-intermediate-size",
    "tp": "--mamba-num-groups",
    "heads": "--mamba-num-heads",
    "two": "--linear-num-key-heads --linear-num-value-heads",
}


class Shrunk(NamedTuple):
    """What is run in place of a command.

    Attributes:
        flags: of the layout.
        world: its ranks.
        lost: (flag, why) of everything that is not kept.
    """

    flags: Flags
    world: int
    lost: list[tuple[str, str]]

    @property
    def stock(self) -> Flags:
        """The layout without our flags."""
        return _without(self.flags, OURS)

    @property
    def ours(self) -> str:
        """Our flags, as the command has them."""
        return " ".join(self.flags.text(name) for name in self.flags.matching(*OURS.split()))

    def reference(self) -> Flags:
        """One process without any layout, with the same model, data and batch."""
        flags = _without(self.flags, DIVIDING)
        # Megatron pads the vocabulary to a multiple of this times TP.
        flags.append(_DIVISIBLE, _VOCABULARY * self.flags.number(TP, 1))
        for name in flags.matching(
            "--hybrid-layer-pattern",
        ):
            flags.append(name, flags.values(name)[0].replace("|", ""))
        return flags


def _without(flags: Flags, beginnings: str) -> Flags:
    flags = flags.copy()
    flags.drop(*flags.matching(*beginnings.split()))
    return flags


def trained(flags: Flags) -> tuple[Flags, list[tuple[str, str]]]:
    """A command's flags without files, logs and what CPU ranks cannot run; and what that loses."""
    flags, lost = _without(flags, _OUTSIDE), list[tuple[str, str]]()
    for why, beginnings in NOT_KEPT.items():
        for name in flags.matching(*beginnings.split()):
            if flags.values(name) not in (["0"], ["0.0"], ["none"]):
                lost.append((flags.text(name), why))
            flags.drop(name)
    for name, old, new, why in _REPLACED:
        if old in (values := flags.values(name)):
            lost.append((f"{name} {old}", why))
            flags.append(name, *(new if value == old else value for value in values))
    return flags, lost


def shrink(words: list[str], world: int = 0, ranks: int = MOST_RANKS) -> Shrunk:
    """The small form of a command.

    Args:
        words: the flags of a training script.
        world: ranks that the command runs on; 0: not known.
        ranks: the most that may be used here.

    Raises:
        ValueError: a flag has an impossible value, or the layout needs more ranks.
    """
    given = Flags(words)
    for name in given.matching("--use-torch-fsdp2", "--use-megatron-fsdp"):
        raise ValueError(f"{name}: fully sharded data parallelism does not run on CPU ranks")
    flags, lost = trained(given)
    ways = world // math.prod(given.number(name, 1) for name in (TP, PP, CP))
    tp, pp, cp, ep, dp = _parallel(flags, ways, ranks)
    _layers(flags, given, pp)
    _sizes(flags, given, tp, cp, ep)
    micro = _least(given, "--micro-batch-size")
    number = given.number("--global-batch-size", 0) // given.number("--micro-batch-size", 1)
    number //= max(1, ways)
    odd = bool(number % given.number(PP, 1)) and _chunks(given) == 1
    # More than one round of the steady state, with a part of one where the command has that.
    count = min(number or 3 * pp, 2 * pp + 1 if odd else 3 * pp)
    count = max(1, count if odd or count <= pp else count - count % pp)
    flags.append("--micro-batch-size", micro)
    flags.append("--global-batch-size", count * micro * dp)
    flags.append("--train-iters", STEPS)
    compared = Flags(_COMPARED.split())
    for name in compared.names:
        flags.append(name, *compared.values(name))
    return Shrunk(flags, tp * pp * cp * dp, lost)


def _least(given: Flags, name: str, default: int = 1) -> int:
    return min(_MOST[name], given.number(name, default))


def _parallel(flags: Flags, ways: int, ranks: int) -> tuple[int, int, int, int, int]:
    """TP, PP, CP, EP, DP: two of each kind, four stages; fewer where the ranks do not suffice."""
    tp, pp, cp, ep = (_least(flags, name) for name in (TP, PP, CP, EP))
    etp = _least(flags, _ETP, flags.number(TP, 1))
    if "--use-tp-pp-dp-mapping" in flags and _ETP in flags and pp > 1:
        etp = max(1, tp * cp // ep)  # experts have as many data-parallel ranks as the others
    instances = _least(flags, _INSTANCES)
    # Experts need so many data-parallel ranks; two are the least that have to agree.
    experts = math.lcm(ep * etp * instances, tp * cp) // (tp * cp)
    dp = needed = math.lcm(experts, math.lcm(instances, cp) // cp)
    if ways > 1 or (not ways and tp * cp * pp * 2 <= ranks):
        dp = max(2, needed)
    while tp * cp * pp * dp > ranks and dp > needed:
        dp -= 1
    while tp * cp * pp * dp > ranks and pp > 2:
        pp //= 2
    if tp * cp * pp * dp > ranks:
        raise ValueError(
            f"the smallest layout of this kind has {tp * cp * pp * dp} ranks (TP {tp}, PP {pp}, "
            f"CP {cp}, EP {ep}, DP {dp}), --ranks allows {ranks}"
        )
    sizes = ((TP, tp), (PP, pp), (CP, cp), (EP, ep), (_ETP, etp), (_INSTANCES, instances))
    for name, size in sizes:
        if name in flags:
            flags.append(name, size)
    if pp == 1:
        flags.drop(_VIRTUAL, _PER_VIRTUAL, _LAYOUT)
    if _GROUP in flags:
        flags.append(_GROUP, pp)
    return tp, pp, cp, ep, dp


def _folded(given: Flags) -> bool:
    """True for a schedule with V placement."""
    return " ".join(given.values("--pp-schedule")).startswith(("v-", "dualpipev", "auto"))


def _chunks(given: Flags) -> int:
    """Model chunks of a rank."""
    ranks = given.number(PP, 1)
    if text := given.values(_LAYOUT):
        return max(1, len(stages_of(text[0])) // ranks)
    if _PER_VIRTUAL in given:
        return max(1, given.number("--num-layers", 1) // ranks // given.number(_PER_VIRTUAL, 1))
    return 2 if _folded(given) else given.number(_VIRTUAL, 1)


def _layers(flags: Flags, given: Flags, pp: int) -> None:
    """The fewest layers that keep every stage and every kind of layer."""
    chunks = min(_chunks(given), 2 if pp > 2 else 3)
    stages = pp * chunks
    each = 2 if stages < 4 and given.number("--num-layers", 0) >= 2 * stages else 1
    count = stages * each
    if _VIRTUAL in flags:
        flags.append(_VIRTUAL, chunks)
    ends = flags.matching("--decoder-first-pipeline", "--decoder-last-pipeline")
    if _LAYOUT in flags:
        text, count = layout(flags.values(_LAYOUT)[0], stages)
        flags.append(_LAYOUT, text)
    elif ends:
        # One layer a chunk at the ends that differ, two in the middle. In V placement an end is a
        # stage, else a rank.
        per, parts = (1, stages) if _folded(given) and _VIRTUAL not in flags else (chunks, pp)
        for name in ends:
            flags.append(name, per)
        count = per * (len(ends) + 2 * (parts - len(ends)))
    elif extra := len(flags.matching("--account-for-")):
        count = 2 * stages - extra
    elif _PER_VIRTUAL in flags:
        flags.append(_PER_VIRTUAL, each)
    for name in flags.matching(
        "--hybrid-layer-pattern",
    ):
        text, count = hybrid(flags.values(name)[0], stages)
        flags.append(name, text)
    flags.append("--num-layers", count)
    for name in flags.matching("--moe-layer-freq", "--linear-attention-freq", "--no-rope-freq"):
        flags.append(name, frequencies(flags.values(name)[0], count))
    for name in flags.matching("--recompute-num-layers", "--mtp-num-layers"):
        flags.append(name, _least(given, name))


def _sizes(flags: Flags, given: Flags, tp: int, cp: int, ep: int) -> None:
    """Hidden sizes, heads, experts, vocabulary, sequence."""
    heads = given.number("--num-attention-heads", 4)
    if "--group-query-attention" in flags or "--num-query-groups" in flags:
        groups = min(given.number("--num-query-groups", 1), 2 * tp, heads)
        flags.append("--num-query-groups", groups)
        heads = groups * min(2, max(1, heads // groups))
    else:
        heads = 2 * tp
    heads = max(heads, 2 * tp)
    hidden = _HEAD * heads
    flags.append("--num-attention-heads", heads)
    flags.append("--hidden-size", hidden)
    flags.append("--ffn-hidden-size", 2 * hidden)
    sizes = {"head": _HEAD, "half": hidden // 2, "hidden": hidden}
    sizes |= {"tp": tp, "heads": heads, "two": 2 * tp}
    for size, names in _SMALL.items():
        for name in set(names.split()) & set(flags.names):
            flags.append(name, sizes[size])
    if given.number("--num-experts", 0):
        for name in ("--moe-router-num-groups", "--moe-router-topk", "--moe-router-group-topk"):
            if name in flags:
                flags.append(name, _least(given, name))
        least = 2 * flags.number("--moe-router-topk", 2)
        least = max(4, 2 * ep, least, 2 * flags.number("--moe-router-num-groups", 1))
        experts = min(given.number("--num-experts", 0), least)
        flags.append("--num-experts", experts - experts % ep)
    tokens = given.number("--pp-slice-tokens", 0)
    if tokens:
        flags.drop("--pp-slice-tokens")
        flags.append("--pp-slices", max(1, -(-given.number("--seq-length", 1) // tokens)))
    if "--pp-slices" in flags:
        flags.append("--pp-slices", min(4, flags.number("--pp-slices", 1)))
    for name in ("--seq-length", "--max-position-embeddings"):
        flags.append(name, 16 * cp)
    flags.drop("--padded-vocab-size")
    flags.append("--vocab-size", _VOCABULARY * tp - 1)  # a null tokenizer may add one token
    flags.append(_DIVISIBLE, _VOCABULARY)


def sample(items: list[str], number: int) -> list[str]:
    """``number`` of ``items`` in their order, first and last among them, every kind if it can be.

    A kind that an even choice would miss takes the place of one that is there twice.
    """
    if number >= len(items):
        return items + items[-1:] * (number - len(items))
    if number == 1:
        return items[:1]
    chosen = [round(i * (len(items) - 1) / (number - 1)) for i in range(number)]
    for kind in dict.fromkeys(items):
        if any(items[at] == kind for at in chosen):
            continue
        for i, old in enumerate(chosen):
            if sum(items[other] == items[old] for other in chosen) > 1:
                chosen[i] = items.index(kind)
                break
    return [items[at] for at in sorted(chosen)]


def frequencies(text: str, number: int) -> str:
    """A layer frequency (``2``, or a Python list of 0 and 1) for ``number`` layers.

    Raises:
        ValueError: it is neither.
    """
    try:
        items = listed(text)
    except ValueError:
        raise ValueError(f"{text}: neither a number nor a list of 0 and 1") from None
    if isinstance(items, int):
        return str(min(items, max(1, number // 2)))
    return "[" + ",".join(sample([str(item) for item in items], number)) + "]"


def stages_of(text: str) -> list[str]:
    """The stages of a pipeline layout, repetitions written out."""
    return ["".join(c for c in part if c in "EtmL") for part in expanded(text).split("|")]


def layout(text: str, stages: int) -> tuple[str, int]:
    """A pipeline layout (``Et*3|(tt|)*29,m|L``) of so many stages, and its decoder layers.

    First and last stage stay what they are, those between are chosen evenly; runs of layers keep
    one layer, or two where the longest stage has at least twice those of the shortest that has any.
    """
    given = stages_of(text)
    counts = [stage.count("t") for stage in given if "t" in stage]
    uneven = bool(counts) and max(counts) >= 2 * min(counts)
    parts = []
    for stage in sample(given, stages):
        number = stage.count("t")
        most = 2 if uneven and number == max(counts) else 1
        head, _, tail = stage.partition("t")
        parts.append(head + "t" * min(number, most) + tail.replace("t", ""))
    return "|".join(parts), sum(part.count("t") for part in parts)


def hybrid(text: str, stages: int) -> tuple[str, int]:
    """A hybrid model's pattern of letters with so many layers as stages, or as kinds of layers.

    A multi-token prediction part after ``/`` stays as it is.
    """
    main, slash, rest = text.partition("/")
    letters = [*main.replace("|", "")]
    number = stages * max(1, -(-len(set(letters)) // stages))
    chosen = sample(letters, min(len(letters), number))
    if "|" in main:
        each = max(1, len(chosen) // stages)
        parts = [chosen[i : i + each] for i in range(0, len(chosen), each)]
        return "|".join("".join(part) for part in parts) + slash + rest, len(chosen)
    return "".join(chosen) + slash + rest, len(chosen)
