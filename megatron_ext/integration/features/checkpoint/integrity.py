"""Loading refuses an incomplete checkpoint; a failed save reports what a restart will load."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ....checkpoints import folder as saved
from ...arguments import MegatronArgs
from ...errors import ConfigError
from . import metadata as stored

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        metadata[str(folder)] = read = stored.read(str(folder))
        return stored.files(read)

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
