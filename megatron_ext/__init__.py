"""Pipeline schedules with controllable memory for stock Megatron-LM.

Importing this package has no side effects: no torch, no CUDA, no Megatron, nothing patched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .integration import Report

__version__ = "0.3.0.dev0"
__all__ = ["apply", "disable", "enable", "forward_backward_func", "revert"]


def enable(schedule: str | None = None, **options: object) -> Report:
    """Let any trainer on megatron-core run a schedule of ours; no argument parser is involved.

    Call it on every rank before ``initialize_model_parallel`` and before the model is built and
    wrapped. For schedules without V placement only the wrapping and the first pipeline call matter.
    V placement needs ``virtual_pipeline_model_parallel_size=2`` wherever the trainer sets it.
    Several models may train in one process; schedule and offload are settled for each.

    Args:
        schedule: a schedule's name, or the path of a schedule file; None: Megatron's own, for
            options that work without (``moe_pipeline_chunks``).
        options: our flags without dashes and ``--pp-``: ``memory_cap=0.6``, ``offload="half"``,
            ``trace="traces"``, ``moe_pipeline_chunks=4``. ``microbatch_costs`` may also be
            a function from what a data iterator gives for one microbatch to its sequences' lengths.

    Returns:
        What is replaced in Megatron, and where: print it. It stays current.

    Raises:
        ValueError: (``integration.ConfigError``) an unknown option; one that needs Megatron's
            training loop; nothing would call the schedule (no pipeline); someone holds Megatron's
            function already, or has replaced it; ``enable`` or ``apply`` was called before. What
            only a model shows is raised by its first forward-backward call, before any pass.
    """
    from .integration import library

    return library.enable({"schedule": schedule, **options})


def disable() -> None:
    """Undo ``enable``: Megatron has every symbol again. Without it, nothing happens.

    A model built under a V schedule keeps its placement: do not train it on after this.
    """
    revert()


def forward_backward_func(schedule: str, **options: object) -> Callable[..., Any]:
    """A forward-backward function with the keywords of Megatron's own, for a loop of your own.

    Nothing global is replaced but while it runs. V placement needs ``enable``.

    Args:
        schedule: a schedule's name or the path of a schedule file, without V placement.
        options: as ``enable``.

    Returns:
        To be called in place of what ``get_forward_backward_func()`` returns, with
        ``forward_step_func``, ``data_iterator``, ``model``, ``num_microbatches``, ``seq_length``,
        ``micro_batch_size`` and the rest.

    Raises:
        ValueError: (``integration.ConfigError``) as ``enable``.
    """
    from .integration.library import DropIn

    return DropIn({"schedule": schedule, **options})


def apply(config: Mapping[str, object] | None = None, *, exist_ok: bool = False) -> Report:
    """Let the Megatron of this process know our flags; call it before Megatron parses its own.

    For a training script of your own, as its first line; the patch series calls it too. Flags are
    then read from the command line as with the launcher. Without any, Megatron trains as stock.

    Args:
        config: values for flags that the command line does not give, by attribute name:
            ``{"pp_schedule": "v-half", "pp_trace": "traces"}``.
        exist_ok: return the report, instead of raising, where we are applied already; a ``config``
            is refused then.

    Returns:
        What is replaced in Megatron, and where: print it. It stays current.

    Raises:
        ValueError: (``integration.ConfigError``) applied already, Megatron has parsed its arguments
            already, no supported Megatron, or an unknown name in ``config``.
    """
    from . import integration

    return integration.apply(config, exist_ok=exist_ok)


def revert() -> None:
    """Restore every symbol of Megatron. Without an ``apply``, nothing happens.

    A model built under a V schedule keeps its placement: do not train it on after this.
    """
    from . import integration

    integration.revert()
