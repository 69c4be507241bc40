"""Loading refuses an incomplete checkpoint; a failed save reports what a restart will load."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...._input import shown
from ....checkpoints import folder as saved
from ...arguments import MegatronArgs
from ...errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")


def from_rank_0(compute: Callable[[], T]) -> T:
    """What rank 0 computes, on every rank; called by all.

    Raises:
        ConfigError: on every rank, whatever was raised on rank 0.
    """
    import torch.distributed as dist

    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = compute()
        except Exception as error:  # the other ranks wait for the answer
            answer[1] = str(error) or type(error).__name__
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ConfigError(answer[1])
    found: T = answer[0]
    return found


def require_complete(load_dir: Any, args: MegatronArgs) -> dict[str, Any]:
    """Rank 0 looks at the folder for all; called by every rank before Megatron reads anything.

    A save newer than the iteration to load, complete or not, is only mentioned: Megatron names an
    iteration in its tracker file when all of it is written, and the next save replaces it.

    Args:
        load_dir: what ``--load`` names.

    Returns:
        On rank 0, for a folder in torch_dist: that folder, and its metadata.

    Raises:
        ConfigError: that iteration is incomplete, or the tracker file names none.
    """
    if load_dir is None or "://" in str(load_dir):
        return {}
    metadata: dict[str, Any] = {}

    def check() -> None:
        notice = look(Path(load_dir), args.ckpt_step, metadata)
        if notice is not None:
            logger.warning("%s", notice)

    from_rank_0(check)
    return metadata


def look(root: Path, step: int | None, metadata: dict[str, Any]) -> str | None:
    """Check the iteration to load.

    Args:
        root: the folder of checkpoints.
        step: ``--ckpt-step``.
        metadata: by folder; that of the iteration is added.

    Returns:
        What to mention, if anything.

    Raises:
        ConfigError: the iteration to load is incomplete.
    """
    found = saved.saved(root)
    try:
        wanted = step or saved.tracked(root)
    except ValueError as error:
        raise ConfigError(f"{error}; {_advice(root, found)}") from None
    if wanted is None:
        last = saved.last_complete(found)
        if last is not None:
            raise ConfigError(
                f"{root} has no {saved.TRACKER}, so training would start from the beginning, but "
                f"iteration {last} there is complete: saving was interrupted at its very end, or "
                f"the file was lost; {saved.advice(root, last)}"
            )
        return f"{_interrupted(found, -1)}; nothing else is saved" if found else None

    def files(folder: Path) -> Mapping[str, int]:
        metadata[str(folder)] = here = read(str(folder))
        return files_of(here)

    what = saved.problem(found.get(wanted, root / f"iter_{wanted}"), files)
    if what is not None:
        raise ConfigError(
            f"iteration {wanted} in {root} is incomplete ({what}); {_advice(root, found, wanted)}"
        )
    if step is not None or not isinstance(wanted, int):
        return None
    newer = saved.newer(root, found, wanted) or _interrupted(found, wanted)
    return None if newer is None else f"{newer}; training continues from {wanted}"


def report_failure(original: Callable[..., Any], iteration: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_checkpoint`` that logs, where it fails, what a restart will load."""
    try:
        return original(iteration, *args, **kwargs)
    except BaseException as error:  # torch's CheckpointException is no Exception
        from megatron.training import get_args

        with contextlib.suppress(Exception):  # the error itself is what must come out
            logger.error("%s", failed_save(iteration, get_args().save, error))
        raise


def failed_save(iteration: Any, place: Any, error: BaseException) -> str:
    """One sentence: what failed, how full the disk is, and which iteration a restart loads."""
    root = Path(place)
    free = shutil.disk_usage(root).free
    last = saved.tracked(root)
    rest = "nothing is saved yet" if last is None else f"a restart continues from iteration {last}"
    text = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return (
        f"saving iteration {iteration} to {root} failed ({what}); {free / (1 << 20):.1f} MiB are "
        f"free there; {rest}"
    )


def _interrupted(found: Mapping[int | str, Path], iteration: int) -> str | None:
    """Which save after ``iteration`` was interrupted, and how far it came."""
    for number in sorted((n for n in found if isinstance(n, int) and n > iteration), reverse=True):
        what = saved.unfinished(found[number])
        if what is not None:
            return f"saving iteration {number} to {found[number]} was interrupted ({what})"
    return None


def _advice(root: Path, found: dict[int | str, Path], but: int | str | None = None) -> str:
    return saved.advice(root, saved.last_complete(found, but))


def read(folder: str) -> Any:
    """The metadata of an iteration's folder, which may be on remote storage.

    Raises:
        ValueError: it cannot be read.
    """
    # As Megatron itself does next; not for a folder that is only to be looked at. Its reader of
    # shapes makes tensors of them, which new releases of torch refuse.
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    try:
        return _get_filesystem_reader(folder).read_metadata()
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from None


def files_of(metadata: Any) -> dict[str, int]:
    """File -> bytes that it must have."""
    found: dict[str, int] = {}
    for place in (getattr(metadata, "storage_data", None) or {}).values():
        name = str(place.relative_path)
        found[name] = max(found.get(name, 0), int(place.offset) + int(place.length))
    return found


def model_shapes(metadata: Any) -> dict[str, tuple[int, ...]]:
    """Global shapes of the model's tensors.

    Raises:
        ValueError: it is not what Megatron writes.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = getattr(metadata, "state_dict_metadata", None)
    # Where Megatron stored a tensor in another shape, it kept the one it has in the model.
    original = getattr(metadata, "mcore_data", {})
    if not isinstance(entries, dict) or not isinstance(original, dict):
        raise ValueError("it does not list tensors by name; the file is damaged")
    shapes = {}
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata) or _OPTIMIZER_KEY.match(str(key)):
            continue
        kept = original.get(key, {})
        if not isinstance(kept, dict):
            raise ValueError(f"its note on {shown(key)} is {shown(kept)}; the file is damaged")
        shapes[str(key)] = saved.shape(str(key), entry.size, kept)
    return shapes
