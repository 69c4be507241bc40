"""Denials: what would train silently wrong numbers, as one table.

A denial has one sentence with the way out, and an example that trips it. Most are seen in the
arguments; the others where their fact is: in an attention mask, in a hook, in a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ConfigError

if TYPE_CHECKING:
    from .feature import Run

# Features of ours.
ORDER, SLICES, VOCABULARY = "schedules", "slices", "sharded vocabulary"
VEE, CHUNKS, LENGTHS = "V placement", "MoE chunks", "orders by lengths"
WEIGHTS = "passes for weight gradients"


class Arguments:
    """Megatron's arguments or a model's configuration, in which what is missing is None."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name, None)

    def words(self, name: str) -> set[str]:
        """Values of an argument that takes several, as a command line has them."""
        value = getattr(self, name)
        several = value if isinstance(value, (list, tuple)) else [value]
        names = [str(getattr(one, "name", one)) for one in several if one]
        return {word for text in names for word in text.replace(",", " ").split()}

    @property
    def graphs(self) -> bool:
        """CUDA graphs are asked for."""
        impl = self.cuda_graph_impl or "none"
        return impl != "none" or bool(self.enable_cuda_graph or self.external_cuda_graph)

    @property
    def by_rank(self) -> Any:
        """Checkpoints are saved, loaded or converted in files by rank."""
        used = self.save or (self.load and not self.auto_detect_ckpt_format)
        return (self.ckpt_format == "torch" and used) or self.ckpt_convert_format == "torch"

    @property
    def recurrent(self) -> bool:
        """A hybrid model has layers with a state."""
        patterns = (self.hybrid_layer_pattern, self.hybrid_override_pattern)
        return any({"M", "G"} & {*(text or "")} for text in patterns)


class Denial(NamedTuple):
    """A combination that is denied.

    Attributes:
        feature: of ours.
        beside: what it does not go with.
        sentence: of the error; names in braces are facts of the run.
        example: flags that trip it; empty where it is seen at run time.
        applies: true where the arguments ask for what is beside it; None: it is seen at run time.
    """

    feature: str
    beside: str
    sentence: str
    example: str = ""
    applies: Callable[[Arguments], Any] | None = None


def denied(args: Any, features: Collection[str]) -> str | None:
    """The sentence of the first denial of a run; None: nothing is denied.

    Args:
        args: Megatron's arguments, before or after its validation, or a model's configuration.
        features: that are in use.
    """
    asked = Arguments(args)
    for one in DENIALS:
        if one.applies is not None and one.feature in features and one.applies(asked):
            return one.sentence
    return None


_CALLS = (
    "Slices and chunks do not support delayed FP8 scales, which count calls; use --fp8-recipe "
    "blockwise, mxfp8 or tensorwise."
)
_SAVED = (
    "--logits-save-dir counts calls as microbatches in the order of the data; drop it, or slices "
    "and --pp-reorder-microbatches."
)
_RECIPE = "--fp8-recipe delayed"


def _scaled_by_calls(it: Arguments) -> bool:
    return bool(it.fp8) and bool({"delayed", "custom"} & it.words("fp8_recipe"))


# Seen at run time.
CAUSAL = Denial(
    SLICES,
    "attention that is not causal, or is not cut",
    "Slices need causal core attention in every layer, but {found}; drop slices.",
)
NO_GAPS = Denial(
    SLICES,
    "packed documents with padding between them",
    "Slices need documents that follow one another, but there is padding between them; pack "
    "without padding, or drop slices.",
)
ONE_ROW = Denial(
    SLICES,
    "seq_aux_loss with several packed samples in a row",
    "Slices need one packed sample a row for seq_aux_loss; give --micro-batch-size 1 or use "
    "aux_loss.",
)
LINEAR = Denial(
    SLICES,
    "a loss function that is not linear in the losses of tokens",
    "Slices need a loss function that is linear in the losses of tokens, but {found}; drop slices.",
)
SUMS = Denial(
    SLICES,
    "reports that are not sums of losses",
    "Slices need reports that are sums of losses, or sums with their tokens, but {name} is not; "
    "report it so.",
)
DRAWS = Denial(
    SLICES,
    "a forward step that draws random numbers",
    "Slices call the forward step several times, and it draws random numbers; draw them in the "
    "data set.",
)
HOOKED = Denial(
    VOCABULARY,
    "hooks on embedding or output layer (--logits-save-dir, --logits-load-dir, distillation)",
    "--pp-vocab-parallel does not support hooks on embedding or output layer, which would get "
    "hidden states; remove {name}.",
)
OWN_LOSS = Denial(
    VOCABULARY,
    "a model with its own compute_language_model_loss",
    "--pp-vocab-parallel computes Megatron's cross entropy, but this model has another loss; drop "
    "it.",
)
TIED = Denial(
    VOCABULARY + ", " + VEE,
    "tied weights of which some copies are frozen, or differ",
    "Tied weights need copies that are equal and frozen alike, but {found}; {fix}.",
)
DELAYED = Denial(
    WEIGHTS,
    "layers that were built with delay_wgrad_compute",
    "This model's layers delay weight gradients themselves, and nobody would compute them; build "
    "it without delay_wgrad_compute.",
)
WRAPPED = Denial(
    WEIGHTS,
    "a model that was wrapped before enable()",
    "Gradients need hooks that are made when the model is wrapped; call megatron_ext.enable() "
    "before that.",
)
REPLICAS = Denial(
    LENGTHS,
    "a loss function that talks to data replicas",
    "The loss function must not talk to data replicas, whose microbatches come in another order; "
    "do it after the step.",
)
BY_RANK = Denial(
    VEE,
    "--ckpt-format torch, --ckpt-convert-format torch, files by rank",
    "A V cannot use checkpoints by rank, which number layers in loop order; use --ckpt-format "
    "torch_dist.",
    "--ckpt-format torch --save folder",
    lambda it: it.by_rank,
)
DENIALS = (
    Denial(
        SLICES,
        "--moe-expert-capacity-factor",
        "Slices do not support --moe-expert-capacity-factor: each slice would drop other tokens "
        "than its sequence; drop one of them.",
        "--moe-expert-capacity-factor 1.0",
        lambda it: it.moe_expert_capacity_factor is not None,
    ),
    Denial(
        SLICES,
        "--moe-router-load-balancing-type sinkhorn, quantile_balancing",
        "Slices do not support this load balancing: it balances the tokens of one call; use "
        "aux_loss or an expert bias.",
        "--moe-router-load-balancing-type sinkhorn",
        lambda it: {"sinkhorn", "quantile_balancing"} & it.words("moe_router_load_balancing_type"),
    ),
    Denial(
        SLICES,
        "recurrent layers of --hybrid-layer-pattern (M, G)",
        "Slices do not support recurrent layers, whose state would begin anew in every slice; drop "
        "one of them.",
        "--hybrid-layer-pattern M*-M",
        lambda it: it.recurrent,
    ),
    Denial(
        SLICES,
        "--context-parallel-size",
        "Slices do not support --context-parallel-size, which cuts sequences too; drop one of "
        "them.",
        "--context-parallel-size 2",
        lambda it: (it.context_parallel_size or 1) > 1,
    ),
    Denial(SLICES, _RECIPE, _CALLS, f"--fp8-format hybrid {_RECIPE}", _scaled_by_calls),
    Denial(CHUNKS, _RECIPE, _CALLS, f"--fp8-format hybrid {_RECIPE}", _scaled_by_calls),
    Denial(
        SLICES,
        "--pp-vocab-parallel with --mtp-num-layers",
        "Slices with --pp-vocab-parallel do not support --mtp-num-layers: tokens behind a slice "
        "would be missing; drop one of the three.",
        "--pp-vocab-parallel --mtp-num-layers 1",
        lambda it: it.pp_vocab_parallel and it.mtp_num_layers,
    ),
    Denial(
        SLICES,
        "--mtp-use-repeated-layer with full recompute",
        "Slices do not support --mtp-use-repeated-layer with --recompute-granularity full: depths "
        "of one layer would be mixed; drop one of them.",
        "--mtp-use-repeated-layer --mtp-num-layers 2 --recompute-granularity full",
        lambda it: (
            it.mtp_use_repeated_layer
            and (it.mtp_num_layers or 0) > 1
            and it.recompute_granularity == "full"
        ),
    ),
    Denial(
        SLICES,
        "--multi-latent-attention with --apply-rope-fusion",
        "Slices do not support fused rotary positions of latent attention, which begin at 0 in "
        "every slice; add --no-rope-fusion.",
        "--multi-latent-attention --apply-rope-fusion",
        lambda it: it.multi_latent_attention and it.apply_rope_fusion,
    ),
    Denial(
        SLICES,
        "--logits-save-dir",
        _SAVED,
        "--logits-save-dir folder",
        lambda it: it.logits_save_dir,
    ),
    Denial(
        ORDER,
        "--pp-reorder-microbatches with --logits-save-dir",
        _SAVED,
        "--pp-reorder-microbatches --logits-save-dir folder",
        lambda it: it.pp_reorder_microbatches and it.logits_save_dir,
    ),
    CAUSAL,
    NO_GAPS,
    ONE_ROW,
    LINEAR,
    SUMS,
    DRAWS,
    Denial(
        VOCABULARY,
        "--use-mup",
        "--pp-vocab-parallel does not support --use-mup, whose factors its passes do not apply; "
        "drop one of them.",
        "--use-mup",
        lambda it: it.use_mup,
    ),
    HOOKED,
    OWN_LOSS,
    TIED,
    Denial(
        VEE,
        "--reset-attention-mask with local attention",
        "A V does not support --reset-attention-mask with local attention: middle stages would "
        "look across documents; use zb-h1 on two ranks.",
        "--reset-attention-mask --transformer-impl local",
        lambda it: it.reset_attention_mask and it.transformer_impl == "local",
    ),
    BY_RANK,
    Denial(
        CHUNKS,
        "--moe-shared-expert-overlap",
        "--moe-pipeline-chunks does not support --moe-shared-expert-overlap: shared experts would "
        "be left out; drop it, chunks overlap them anyway.",
        "--moe-shared-expert-overlap",
        lambda it: it.moe_shared_expert_overlap,
    ),
    Denial(
        CHUNKS,
        "--overlap-dispatch-backward-with-experts-wgrad",
        "--moe-pipeline-chunks does not support --overlap-dispatch-backward-with-experts-wgrad: "
        "nobody would compute the experts' weight gradients; drop it.",
        "--overlap-dispatch-backward-with-experts-wgrad",
        lambda it: it.overlap_dispatch_backward_with_experts_wgrad,
    ),
    Denial(
        ORDER,
        "--defer-embedding-wgrad-compute",
        "Schedules of ours do not support --defer-embedding-wgrad-compute: nothing would compute "
        "the output layer's weight gradient; drop it.",
        "--defer-embedding-wgrad-compute",
        lambda it: it.defer_embedding_wgrad_compute,
    ),
    DELAYED,
    WRAPPED,
    Denial(
        ORDER,
        "CUDA graphs (--cuda-graph-impl local, transformer_engine, full_iteration)",
        "Graphs are captured and replayed in the order of stock's schedule; drop "
        "--cuda-graph-impl.",
        "--cuda-graph-impl full_iteration",
        lambda it: it.graphs,
    ),
    REPLICAS,
)


def require_allowed(args: Any, features: Collection[str]) -> None:
    """Refuse arguments that are denied beside features of ours.

    Args:
        args: Megatron's, or a model's configuration.

    Raises:
        ConfigError: the denial's sentence.
    """
    sentence = denied(args, features)
    if sentence is not None:
        raise ConfigError(sentence)


def in_use(run: Run) -> set[str]:
    """Features of ours that are in use, as ``support`` names them."""
    args, request = run.args, run.request
    used = {CHUNKS} if run.experts_in_chunks else set()
    if request is None:
        return used
    file = request.file
    sliced = args.pp_slices not in (None, 1) or args.pp_slice_tokens or (file and file.slices)
    return used | {
        ORDER,
        *([VEE] if request.vee else ()),
        *([SLICES] if sliced else ()),
        *([VOCABULARY] if args.pp_vocab_parallel else ()),
    }


def require(denial: Denial, kept: object, **facts: object) -> None:
    """Refuse a fact of a run that is denied.

    Args:
        kept: it is not.
        facts: names in the denial's sentence.

    Raises:
        ConfigError: the denial's sentence.
    """
    if not kept:
        raise ConfigError(denial.sentence.format(**facts))
