"""The model under ``--pp-vocab-parallel``: every rank of a pipeline owns an equal part of the rows
of embedding and output layer (arXiv 2411.05288, section 3).

Megatron builds the whole matrices on the first and the last stage, as usual, so they start with the
very same values. When a rank has built its last chunk, and the script has made what it wants of it,
both are shared out, and what is left of them is a module that takes part in the passes: one that
brings embeddings in, one that hands hidden states out. So the first and the last rank hold a whole
matrix for a moment while they build.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ....runtime.weight_hooks import foreign_hooks
from ...building import Building, FirstChunk
from ...errors import ConfigError
from ...hooks import Hook, bound, hooked
from ...support import HOOKED, OWN_LOSS, TIED, require
from ...targets import GPT_INIT
from ...utils import unwrapped
from .ends import FLAG, Ends, HiddenStates, SharedEmbedding, hidden_of, losses_of, with_hooks_of

_LOADED = "a model without shards would be loaded before it is refused"
_SHARD = "vocabulary"  # the shard's name in a rank's first chunk
# Names in checkpoints, and in Megatron's own model.
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class VocabularyShard(torch.nn.Module):
    """The rows of both matrices that this rank owns.

    Args:
        embedding: [n, h].
        output: [n, h]; None if it is the embedding (tied weights).
        index: which of the parts of n rows these are.
        parts: of the whole vocabulary: pipeline ranks times tensor ranks.
        frozen: the script has frozen embedding, output layer.

    Attributes:
        has_own_passes: the gradients come neither in B nor in W.
        embedding, output: parameters [n, h], one and the same if tied.
        first_row: the first one's number in the whole vocabulary.
    """

    has_own_passes = True
    output_layer: Parameter | None

    def __init__(
        self,
        embedding: Tensor,
        output: Tensor | None,
        index: int,
        parts: int,
        frozen: Sequence[bool] = (False, False),
    ) -> None:
        super().__init__()
        self.embedding = _parameter(embedding, frozen[0])
        layer = None if output is None else _parameter(output, frozen[1])
        self.register_parameter("output_layer", layer)
        self.tied = output is None
        self.first_row = index * embedding.shape[0]
        self._index, self._parts = index, parts

    def forward(self) -> None:
        """Nothing itself; Megatron's data parallelism waits for gathered weights before it."""

    @property
    def output(self) -> Parameter:
        """The output layer's rows."""
        return self.embedding if self.output_layer is None else self.output_layer

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """By this module's names, parts of the tensors that Megatron's own checkpoints hold.

        Args:
            prefix: of this module's names.
            sharded_offsets: of layers; none for these parameters.
            metadata: Megatron's, with its data-parallel group.
        """
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

        copy = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"].rank()
        model = prefix.removesuffix(f"{_SHARD}.")
        found = {"embedding": (_EMBEDDING, self.embedding)}
        if not self.tied:
            found["output_layer"] = (_OUTPUT, self.output)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                model + key,
                parameter,
                (0, self._index, self._parts),
                replica_id=(0, 0, copy),
                # As in stock: the padding of the vocabulary may differ.
                allow_shape_mismatch=True,
            )
            for name, (key, parameter) in found.items()
        }


def shard_of(models: Sequence[Any]) -> VocabularyShard:
    """This rank's rows.

    Args:
        models: its chunks, in whatever wrappers.

    Raises:
        ConfigError: the model has none: it is no GPTModel.
    """
    chunk = unwrapped(models[0])
    shard = getattr(chunk, _SHARD, None)
    if not isinstance(shard, VocabularyShard):
        raise ConfigError(f"{FLAG} is for GPTModel, and this is a {type(chunk).__name__}")
    return shard


@dataclass(frozen=True)
class _Pipeline:
    """The ranks that share a model's vocabulary.

    Attributes:
        tensor_rank, tensor_ranks: this rank's place in, and the size of, its tensor-parallel group.
        last: the pipeline rank that has built the output layer; rank 0 has built the embedding.
    """

    group: dist.ProcessGroup
    tensor_rank: int
    tensor_ranks: int
    last: int

    @property
    def index(self) -> int:
        """Which part this rank owns: a part of what stock's tensor rank has."""
        return self.tensor_rank * self.group.size() + self.group.rank()

    @property
    def parts(self) -> int:
        """Of the vocabulary."""
        return self.tensor_ranks * self.group.size()

    def scatter(self, whole: Tensor | None, source: int, like: Tensor) -> Tensor:
        """This rank's rows of the matrix [V/t, h] that pipeline rank ``source`` has."""
        rows = torch.empty_like(like)
        parts = None
        if self.group.rank() == source:
            assert whole is not None
            parts = list(whole.detach().to(like.device).chunk(self.group.size()))
        sender = dist.get_process_group_ranks(self.group)[source]
        dist.scatter(rows, parts, src=sender, group=self.group)
        return rows

    def frozen(
        self, matrices: Sequence[Sequence[Parameter]], device: torch.device, own_loss: bool
    ) -> list[bool]:
        """Which matrices the script has frozen on all ranks that have a copy.

        Args:
            matrices: the copies that this rank has of embedding and output layer.
            own_loss: the last stage is here, and the script has given it another loss.

        Raises:
            ConfigError: of one matrix some copies are frozen, or one has hooks; or such a loss.
        """
        counts = [n for m in matrices for n in (sum(not p.requires_grad for p in m), len(m))]
        hooks = sum(bool(foreign_hooks(p)) for m in matrices for p in m)
        found = torch.tensor([*counts, hooks, own_loss], device=device)
        dist.all_reduce(found, group=self.group)
        *counted, hooked, replaced = found.tolist()
        require(HOOKED, not hooked, name="those on their weights")
        require(OWN_LOSS, not replaced)
        for frozen, copies in (counted[:2], counted[2:]):
            some = f"{frozen} of {copies} are frozen"
            require(TIED, frozen in (0, copies), found=some, fix="freeze all of them or none")
        return [counted[0] > 0, counted[2] > 0]


class SharedOut(Ends):
    """Where Megatron builds a model, whose vocabulary is shared out.

    Attributes:
        vee: the first pipeline rank holds the last stage too; else the last rank does.
    """

    vee = False

    def __init__(self) -> None:
        self._first = FirstChunk(FLAG)
        self._later: list[Callable[[], None]] | None = None

    @hooked(GPT_INIT, "the first and the last rank would hold all of the vocabulary")
    def _model_init(
        self, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
    ) -> None:
        given = bound(original, model, *args, **kwargs).arguments
        config = given["config"]
        pp, tp = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
        original(model, *args, **kwargs)
        tied = model.share_embeddings_and_output_weights
        # There are no two copies to be reduced, and none to be tied in a checkpoint.
        model.share_embeddings_and_output_weights = False
        stage = given.get("vp_stage") or 0
        if stage == 0:
            self._first.set(model)
        if stage != (config.virtual_pipeline_model_parallel_size or 1) - 1:
            return
        last = 0 if self.vee else pp - 1
        place = _Pipeline(model.pp_group, model.tp_group.rank(), tp, last)
        rows = given["vocab_size"] // (pp * tp)
        share = functools.partial(_share_out, self._first.get(), model, tied, rows, place)
        share() if self._later is None else self._later.append(share)

    def script_hooks(self) -> list[Hook]:
        """Where Megatron's training scripts build models."""
        return Building(_LOADED, finished=self.whole_until_called, built=shard_of).hooks()

    @contextlib.contextmanager
    def whole_until_called(self) -> Iterator[Callable[[], None]]:
        """Models that are built inside keep whole matrices until what it yields is called."""
        before, self._later = self._later, []

        def share_out() -> None:
            while self._later:
                self._later.pop(0)()

        try:
            yield share_out
        finally:
            self._later = before


def _share_out(first: Any, last: Any, tied: bool, rows: int, place: _Pipeline) -> None:
    """Give each rank of the pipeline its rows, and replace what had all of them."""
    config = first.config
    device = torch.device("cuda", torch.cuda.current_device())
    like = torch.empty(rows, config.hidden_size, dtype=config.params_dtype, device=device)
    words = first.embedding.word_embeddings if first.pre_process else None
    layer = last.output_layer if last.post_process else None
    ends = [model.embedding for model in {first, last} if hasattr(model, "embedding")]
    copies = [[one.word_embeddings.weight for one in ends], []]
    if layer is not None:
        copies[not tied].append(layer.weight)
    frozen = place.frozen(copies, device, layer is not None and _has_own_loss(last))
    embedding = place.scatter(None if words is None else words.weight, 0, like)
    output = None
    if not tied:
        output = place.scatter(None if layer is None else layer.weight, place.last, like)
    first.add_module(_SHARD, VocabularyShard(embedding, output, place.index, place.parts, frozen))
    for embedding in ends:
        whole = embedding.word_embeddings
        shared = SharedEmbedding(whole.tp_group, whole.reduce_scatter_embeddings)
        embedding.word_embeddings = with_hooks_of(whole, shared)
    # Multi-token prediction runs; what Megatron does with a second embedding does not.
    last.mtp_process = False
    if layer is not None:
        last.output_layer = with_hooks_of(layer, HiddenStates())  # the first step refuses them
        last.compute_language_model_loss = losses_of


def _has_own_loss(model: Any) -> bool:
    """True if a subclass, or the script, has another loss than Megatron's."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    found = getattr(model.compute_language_model_loss, "__func__", None)
    return found is not LanguageModule.compute_language_model_loss


def require_losses_of(models: Sequence[Any]) -> None:
    """The script has not given the last stage another loss since it was built.

    Raises:
        ConfigError: it has; that would take losses for logits.
    """
    if hidden_of(models) is not None:
        require(OWN_LOSS, unwrapped(models[-1]).compute_language_model_loss is losses_of)


def _parameter(rows: Tensor, frozen: bool) -> Parameter:
    """A parameter as Megatron marks those of embedding and output layer."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    parameter = Parameter(rows, requires_grad=not frozen)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    parameter.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    return parameter
