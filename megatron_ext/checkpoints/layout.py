"""Layout of a run: the sizes that place parameters on ranks."""

from __future__ import annotations

from dataclasses import dataclass

from .._input import whole


@dataclass(frozen=True)
class Layout:
    """What decides which parameters lie on which rank, in which chunk.

    Attributes:
        tp, pp, ep, etp: tensor, pipeline, expert and expert-tensor parallel sizes.
        chunks: model chunks a rank.
        placement: ``loop`` (Megatron's) or ``vee``.
        layers: other flags that place layers on stages, as text.
        vocabulary: embedding and output layer are shared out over the pipeline's ranks.
    """

    tp: int
    pp: int
    ep: int
    etp: int
    chunks: int
    placement: str
    layers: str
    vocabulary: bool

    @classmethod
    def of(cls, args: object) -> Layout:
        """Layout of a run, from its validated arguments or those in its checkpoint.

        Raises:
            ValueError: a size is no whole number.
        """

        def number(name: str) -> int:
            return whole(getattr(args, name, None) or 1, name, 1)

        layers = [
            f"{name}={getattr(args, name)}"
            for name in (
                "num_layers",
                "pipeline_model_parallel_layout",
                "hybrid_layer_pattern",
                "decoder_first_pipeline_num_layers",
                "decoder_last_pipeline_num_layers",
                "account_for_embedding_in_pipeline_split",
                "account_for_loss_in_pipeline_split",
            )
            if getattr(args, name, None)
        ]
        return cls(
            number("tensor_model_parallel_size"),
            number("pipeline_model_parallel_size"),
            number("expert_model_parallel_size"),
            number(
                "expert_tensor_parallel_size"
                if getattr(args, "expert_tensor_parallel_size", None)
                else "tensor_model_parallel_size"
            ),
            number("virtual_pipeline_model_parallel_size"),
            "vee" if getattr(args, "pp_placement", None) == "vee" else "loop",
            " ".join(layers),
            bool(getattr(args, "pp_vocab_parallel", None)),
        )

    def __str__(self) -> str:
        placed = "V placement" if self.placement == "vee" else "Megatron's placement"
        experts = f", EP {self.ep}" if self.ep > 1 else ""
        sizes = f"TP {self.tp}, PP {self.pp}{experts}, {self.chunks} chunks a rank in {placed}"
        return sizes + ", the vocabulary on all ranks" * self.vocabulary
