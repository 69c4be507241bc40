"""Is what a run is about to load whole? An interrupted save is told in one sentence."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....checkpoints import folder as saved
from ...arguments import MegatronArgs
from ...errors import ConfigError

logger = logging.getLogger(__name__)


def require_whole(load_dir: Any, args: MegatronArgs) -> dict[str, Any]:
    """Rank 0 looks at the folder for all; called by every rank before Megatron reads anything.

    An unfinished save newer than the iteration to load is only mentioned: Megatron names an
    iteration in its tracker file when all of it is written, and the next save replaces it.

    Args:
        load_dir: what ``--load`` names.
        args: Megatron's.

    Returns:
        On rank 0, for a folder in torch_dist: that folder, and its metadata.

    Raises:
        ConfigError: that iteration is not whole, or the tracker file names none.
    """
    import torch.distributed as dist

    if load_dir is None or "://" in str(load_dir):
        return {}
    metadata: dict[str, Any] = {}
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            metadata, said = look(Path(load_dir), args.ckpt_step, _torch_metadata)
            if said is not None:
                logger.warning("megatron_ext: %s", said)
        except Exception as error:  # the other ranks wait for the answer
            answer[0] = str(error) or type(error).__name__
    dist.broadcast_object_list(answer, src=0)
    if answer[0] is not None:
        raise ConfigError(answer[0])
    return metadata


def look(
    root: Path, step: int | None, read_metadata: Callable[[Path], Any]
) -> tuple[dict[str, Any], str | None]:
    """(metadata by folder of the iteration to load, what to mention).

    Args:
        root: the folder of checkpoints.
        step: ``--ckpt-step``.
        read_metadata: of an iteration's folder.

    Raises:
        ConfigError: the iteration to load is not whole.
    """
    found = saved.saved(root)
    wanted: int | str | None = step or None
    if wanted is None:
        try:
            wanted = saved.tracked(root)
        except ValueError as error:
            raise ConfigError(f"{error}; {_fix(root, found, None)}") from None
    if wanted is None:
        last = _last_whole(found, None)
        if last is not None:
            raise ConfigError(
                f"{root} has no {saved.TRACKER}, so training would start anew, but iteration "
                f"{last} there is whole: saving was interrupted at its very end, or the file was "
                f"lost; {_fix(root, found, None)}"
            )
        if found:
            return {}, f"{_unfinished_after(found, -1)}; nothing else is saved"
        return {}, None
    folder = found.get(wanted)
    what = "its folder is missing" if folder is None else saved.unfinished(folder)
    metadata = {}
    if folder is not None and what is None and not saved.by_rank(folder):
        try:
            metadata[str(folder)] = read_metadata(folder)
            what = saved.missing(folder, _files(metadata[str(folder)]))
        except Exception as error:
            what = f"{saved.METADATA} cannot be read: {error}"
    if what is not None:
        raise ConfigError(
            f"iteration {wanted} in {root} is not whole ({what}); {_fix(root, found, wanted)}"
        )
    newer = _unfinished_after(found, wanted) if step is None and isinstance(wanted, int) else None
    return metadata, None if newer is None else f"{newer}; training goes on from {wanted}"


def telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """``save_checkpoint`` that says, where it fails, what a restart will find."""

    @functools.wraps(original)
    def save_checkpoint(iteration: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(iteration, *args, **kwargs)
        except BaseException as error:  # torch's CheckpointException is no Exception
            from megatron.training import get_args

            with contextlib.suppress(Exception):  # the error itself is what must come out
                logger.error("megatron_ext: %s", failed_save(iteration, get_args().save, error))
            raise

    return save_checkpoint


def failed_save(iteration: Any, place: Any, error: BaseException) -> str:
    """One sentence: what failed, how full the disk is, and which iteration is the last good one."""
    root = Path(place)
    free = shutil.disk_usage(root).free
    last = saved.tracked(root)
    rest = "nothing is saved yet" if last is None else f"a restart goes on from iteration {last}"
    text = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return (
        f"saving iteration {iteration} to {root} failed ({what}); {free / (1 << 20):.1f} MiB are "
        f"free there; {rest}"
    )


def _torch_metadata(folder: Path) -> Any:
    # As Megatron itself does next; not from a folder that was only to be looked at.
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    return _get_filesystem_reader(str(folder)).read_metadata()


def _files(metadata: Any) -> dict[str, int]:
    """File -> bytes that it must have, from loaded metadata."""
    files: dict[str, int] = {}
    for place in (getattr(metadata, "storage_data", None) or {}).values():
        name = str(place.relative_path)
        files[name] = max(files.get(name, 0), int(place.offset) + int(place.length))
    return files


def _unfinished_after(found: dict[int | str, Path], iteration: int) -> str | None:
    """Which later save was interrupted, and how far it came."""
    later = [n for n in found if isinstance(n, int) and n > iteration]
    for number in reversed(later):
        what = saved.unfinished(found[number])
        if what is not None:
            return f"saving iteration {number} to {found[number]} was interrupted ({what})"
    return None


def _last_whole(found: dict[int | str, Path], but: int | str | None) -> int | None:
    for number in reversed(found):
        if isinstance(number, int) and number != but and saved.problem(found[number]) is None:
            return number
    return None


def _fix(root: Path, found: dict[int | str, Path], but: int | str | None) -> str:
    last = _last_whole(found, but)
    if last is None:
        return "no other iteration there is whole, so restore it or start anew without --load"
    return (
        f"the last whole one is {last}: write {last} into {root / saved.TRACKER}, or add "
        f"--ckpt-step {last}"
    )
