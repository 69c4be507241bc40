"""What is looked at before a checkpoint is loaded: files as torch writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_ext.checkpoints import folder as saved
from megatron_ext.integration.errors import ConfigError
from megatron_ext.integration.features.checkpoint.integrity import look


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 10 and 100, both complete; the tracker file names 10."""
    for number in (10, 100):
        folder = tmp_path / f"iter_{number:07d}"
        # Zeros, as fresh optimizers have them: the files hold more than their tensors.
        dcp.save({"w": torch.zeros(1000), "step": number}, checkpoint_id=folder, no_dist=True)
        (folder / saved.CONFIG).write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / saved.TRACKER).write_text("10")
    return tmp_path


def test_a_complete_newer_iteration_is_mentioned(root: Path) -> None:
    text = look(root, None, {})
    assert text is not None and text.endswith("training continues from 10")
    assert f"iteration 100 in {root} is complete" in text
    assert look(root, 10, {}) is None
    (root / saved.TRACKER).write_text("100")
    assert look(root, None, {}) is None


def test_a_file_of_zeros_is_refused(root: Path) -> None:
    (file,) = (root / "iter_0000010").glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ConfigError, match=rf"{file.name} holds zeros.*complete one is 100"):
        look(root, None, {})
