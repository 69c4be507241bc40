"""``doctor`` on a whole and on a broken checkout: status and findings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.checkouts import MAIN_TAG, existing
from tests.support.doctor import errors, run, without_gpu

pytestmark = without_gpu


def test_with_a_checkout() -> None:
    checkout = existing(MAIN_TAG)
    done = run("--megatron", str(checkout))
    assert (done.returncode, errors(done)) == (0, [])


@pytest.mark.matrix
def test_with_a_broken_checkout(tmp_path: Path) -> None:
    """A function of Megatron renamed, a patched file changed, the script gone."""
    broken = tmp_path / "Megatron-LM"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(existing(MAIN_TAG) / "megatron", broken / "megatron", ignore=ignored)
    changes = {
        "training/arguments.py": (
            '    """Parse all arguments."""\n',
            '    """Parse all arguments."""\n    # >>> megatron_ext 00000000: edited\n',
        ),
        "core/pipeline_parallel/schedules.py": (
            "forward_backward_pipelining_without_interleaving",
            "forward_backward_without_interleaving",
        ),
    }
    for name, (old, new) in changes.items():
        path = broken / "megatron" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    done = run("--megatron", str(broken))
    assert done.returncode == 1
    for name in ("arguments.py", "forward_backward_pipelining_without_interleaving"):
        assert name in done.stdout
