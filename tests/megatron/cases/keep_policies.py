"""Offload policies as a user would write them, for ``--pp-offload-policy module:function``."""

from __future__ import annotations

from megatron_ext.integration.features.offload.policy import SavedTensor


def keep_mlp(saved: SavedTensor) -> bool:
    """Keep what MLPs save."""
    return ".mlp" in saved.module


class Policies:
    """A function inside a class is found too."""

    @staticmethod
    def keep_all(saved: SavedTensor) -> bool:
        """Keep everything."""
        return True
