"""Launcher of unmodified Megatron training scripts with our flags, on GPUs or CPUs.

    torchrun --nproc-per-node 8 -m megatron_ext.launch path/to/pretrain_gpt.py <Megatron's flags>
    torchrun --nproc-per-node 4 -m megatron_ext.launch --device cpu pretrain_gpt <Megatron's flags>

The launcher's own options stand before SCRIPT; everything after it belongs to the script. SCRIPT
may be the word ``pretrain_gpt``: ``$MEGATRON_LM/pretrain_gpt.py`` where MEGATRON_LM is set, else
this project's short script on the installed megatron-core.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib.machinery
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ._log import PREFIX, VERBOSE, say, verbose
from ._megatron_flags import CPU_DEFAULTS, CPU_NEEDS, CPU_SWITCHES

# Seconds that ranks other than 0 wait before they report an error all ranks will have found:
# torchrun ends every rank as soon as one has failed, and rank 0 should have reported by then.
_REPORT_DELAY_S = 2.0
# And at most for the report of the first rank of the node, where torchrun shows it.
_FIRST_RANK_S = 10.0
# How often a spawned process checks that its rank is alive.
_PARENT_POLL_S = 1.0
# For processes that the script spawns: JSON with device, script and process id of the launcher.
_STARTED = "MEGATRON_EXT_STARTED"
_THIS_MODULE = "megatron_ext.launch"


class LaunchError(Exception):
    """The command line cannot be run; the message is one sentence for the user."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv`` (default: this process's).

    Exits with status 2 and one sentence on stderr when the command line is wrong, whether the
    launcher, or ``megatron_ext.integration`` while the script parses its flags, finds that out.
    Every other exception of the script keeps its traceback.
    """
    options = _parser().parse_args(argv)
    try:
        script = _resolve_script(options.script)
        args = _cpu_arguments(options.args) if options.device == "cpu" else options.args
    except LaunchError as error:
        _fail(str(error))
    _set_path(script)
    _set_tools_path()
    started = {"device": options.device, "script": str(script), "pid": os.getpid()}
    os.environ[_STARTED] = json.dumps(started)
    _prepare_device(options.device)
    status: Any = None
    try:
        _run(script, args, options.loss_log)
    except SystemExit as end:  # as of Megatron at --exit-interval
        if options.device != "cpu":
            raise
        status = end.code
    if options.device == "cpu":
        _leave(status)


def _leave(status: Any) -> NoReturn:
    """End a CPU run without interpreter shutdown; threads of the script (not daemons) end first, as
    usual, exit handlers run, buffers are written.

    Args:
        status: as ``sys.exit`` takes it.

    gloo's threads may still run while the interpreter and torch's static objects are destroyed,
    which has aborted ranks (``terminate called``) after a training run had succeeded.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.launch",
        description="Run a Megatron training script with megatron_ext's flags (--pp-schedule …).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="cpu: run on CPU tensors with gloo, and add the Megatron flags that this needs; "
        "auto and cuda: leave the script's devices alone (default: auto)",
    )
    parser.add_argument(
        "--loss-log",
        metavar="FILE",
        type=Path,
        help="append every iteration's losses and gradient norm to FILE as exact numbers: JSON "
        "lines written by the last rank, floats as hexadecimal",
    )
    parser.add_argument(
        "script", metavar="SCRIPT", help="training script, or the word pretrain_gpt"
    )
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's arguments"
    )
    return parser


def _resolve_script(script: str) -> Path:
    """Return the absolute path of the script to run.

    Raises:
        LaunchError: there is no such file.
    """
    checkout = os.environ.get("MEGATRON_LM")
    if script != "pretrain_gpt":
        path = Path(script)
        problem = f"the script {script} does not exist (from {Path.cwd()})."
    elif checkout:
        path = Path(checkout) / "pretrain_gpt.py"
        problem = (
            f"MEGATRON_LM is {checkout}, but {path} does not exist; set it to a Megatron-LM "
            "checkout or unset it."
        )
    else:
        path = Path(__file__).resolve().parent.parent / "scripts" / "pretrain_gpt_minimal.py"
        problem = (
            "pretrain_gpt means $MEGATRON_LM/pretrain_gpt.py, and MEGATRON_LM is not set; set it "
            "to a Megatron-LM checkout or give the script's path."
        )
    if not path.is_file():
        raise LaunchError(problem)
    return path.resolve()


def _given_value(args: Sequence[str], flag: str) -> str | None:
    """Return the value that ``args`` give to ``flag`` last, or None where it is absent."""
    value = None
    for index, argument in enumerate(args):
        if argument == flag and index + 1 < len(args):
            value = args[index + 1]
        elif argument.startswith(flag + "="):
            value = argument[len(flag) + 1 :]
    return value


def _cpu_arguments(args: Sequence[str]) -> list[str]:
    """Return ``args`` with the flags added that a CPU run needs, and print which.

    Raises:
        LaunchError: ``args`` ask for something that only a GPU can do.
    """
    added: list[str] = []
    for flag, needed in {**CPU_NEEDS, **CPU_DEFAULTS}.items():
        value = _given_value(args, flag)
        if value is None:
            added += [flag, needed]
        elif value != needed and flag in CPU_NEEDS:
            raise LaunchError(
                f"{flag} {value} needs a GPU; with --device cpu leave it out or pass {needed}."
            )
    added += [flag for flag in CPU_SWITCHES if flag not in args]
    if added and _rank() == 0:
        flags = [word for word in added if word.startswith("--")]
        listed = f"{len(flags)} Megatron flags ({VERBOSE}=1 lists them)"
        say(f"--device cpu adds {' '.join(added) if verbose() else listed}")
    return [*args, *added]


def _checkout_of(script: Path) -> Path | None:
    """Return the Megatron-LM checkout that holds ``script``, or None."""
    for directory in script.parents:
        if (directory / "megatron" / "core" / "__init__.py").is_file():
            return directory
    return None


def _set_path(script: Path) -> None:
    """Set ``sys.path`` as Python would for ``script``, with its Megatron checkout ahead of wheels.

    ``python -m`` put the working directory first, where Python puts the script's own; a Megatron
    in the working directory must not win over the script's.
    """
    working_directory = os.getcwd()
    if sys.path and sys.path[0] in ("", working_directory):
        del sys.path[0]
    first = [str(script.parent)]
    checkout = _checkout_of(script)
    if checkout is not None and str(checkout) not in first:
        first.append(str(checkout))
    sys.path[:0] = first
    # megatron_ext itself may have been found through the working directory only.
    home = str(Path(__file__).resolve().parent.parent)
    if home not in sys.path:
        sys.path.append(home)


def _set_tools_path() -> None:
    """Let child processes find this Python first.

    A Megatron checkout compiles its dataset helpers at first start with a Makefile that calls
    ``python3`` (for pybind11) and ``python3-config``: of another Python they give a module that
    this one cannot load, or none.
    """
    tools = [os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin")]
    os.environ["PATH"] = os.pathsep.join([*tools, os.environ.get("PATH", os.defpath)])


def _prepare_device(device: str) -> None:
    if device == "cpu":
        from megatron_ext import cpu

        cpu.install()


def _run(script: Path, args: Sequence[str], loss_log: Path | None) -> None:
    """Run ``script`` as ``__main__`` with megatron_ext's flags known to Megatron."""
    from megatron_ext.integration import ConfigError, install

    sys.argv = [str(script), *args]
    try:
        if install() is not None:
            _require_ranks(args)
        if loss_log is not None:
            _log_losses(loss_log)
        _execute(script, "__main__")
    except (ConfigError, LaunchError) as error:
        _fail(str(error))


def _require_ranks(args: Sequence[str]) -> None:
    """Before Megatron, which would say it otherwise or much later.

    Raises:
        LaunchError: there are no ranks for a pipeline, or they have no device.
    """
    import torch

    if "--pp-schedule" not in _names(args) or {"-h", "--help"} & _names(args):
        return
    if "RANK" not in os.environ:
        raise LaunchError(
            "RANK is not set, so this process is not one of several ranks; start it with torchrun: "
            "torchrun --nproc-per-node N -m megatron_ext.launch SCRIPT ..."
        )
    if not torch.cuda.is_available():
        raise LaunchError(
            "torch finds no CUDA device; run on a machine with GPUs, or add --device cpu before "
            "the script, for CPU ranks: python -m megatron_ext.launch --device cpu SCRIPT ..."
        )


def _names(args: Sequence[str]) -> set[str]:
    return {argument.split("=", 1)[0] for argument in args}


def _log_losses(path: Path) -> None:
    """Make Megatron's ``training_log`` also write what it is given, without rounding, to ``path``.

    It only reads: the losses are those that Megatron has already averaged for its own log line,
    under every schedule and with every script that uses Megatron's training loop.
    """
    import torch
    from megatron.training import training

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise LaunchError(
            f"--loss-log {path} cannot be written ({error.strerror}); give another path"
        ) from None
    training_log = training.training_log
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def logging(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            norm = given["grad_norm"]
            line = {
                "iteration": int(given["iteration"]),
                "losses": {name: float(v).hex() for name, v in given["loss_dict"].items()},
                "grad_norm": None if norm is None else float(norm).hex(),
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return training_log(*args, **kwargs)

    training.training_log = logging


def _execute(script: Path, name: str) -> dict[str, Any]:
    """Execute ``script`` as a fresh module called ``name`` and return what it defined.

    Not runpy.run_path: the module keeps our name in its ``__spec__``, so that a process which the
    script spawns (checkpoint writers do) starts as this module and prepares the device before it
    reads the script.
    """
    module = ModuleType(name)
    module.__file__ = str(script)
    module.__spec__ = importlib.machinery.ModuleSpec(_THIS_MODULE, None, origin=str(script))
    sys.modules[name] = module
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    return module.__dict__


def _become_spawned() -> None:
    """Make this module, in a process spawned by multiprocessing, what the script would be there."""
    started = json.loads(os.environ[_STARTED])
    threading.Thread(target=_end_with_rank, args=(started["pid"],), daemon=True).start()
    _prepare_device(started["device"])
    own = sys.modules[__name__]
    defined = _execute(Path(started["script"]), __name__)
    sys.modules[__name__] = own
    globals().update({k: v for k, v in defined.items() if not k.startswith("__")})


def _end_with_rank(pid: int) -> None:
    """End this process when the rank that spawned it has ended, however that was: a writer of
    checkpoints waits for its next task for ever."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(_PARENT_POLL_S)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _fail(message: str) -> NoReturn:
    """Report one sentence, once for all ranks of a node that have it, and exit with status 2.

    torchrun prints last what the first rank to fail has left in its error file.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not _first_says(message, None if name is None else Path(name)):
        say(f"error: {message}")
        if name is not None:
            about = {"py_callstack": f"{PREFIX} {message}", "timestamp": str(int(time.time()))}
            text = json.dumps({"message": {"message": message, "extraInfo": about}})
            with contextlib.suppress(OSError):
                Path(name).write_text(text)
    sys.exit(2)


def _first_says(message: str, own: Path | None) -> bool:
    """True if the node's first rank reports ``message`` too; others wait for it to do so.

    Args:
        own: this rank's error file, in a folder beside those of the other ranks; None: not
            started by torchrun.
    """
    if _rank() == 0 or os.environ.get("LOCAL_RANK") == "0":
        return False
    ends = time.monotonic() + (_REPORT_DELAY_S if own is None else _FIRST_RANK_S)
    while time.monotonic() < ends:
        time.sleep(0.1)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            first = (own or Path()).parent.parent / "0" / (own or Path()).name
            if json.loads(first.read_text())["message"]["message"] == message:
                return True
    return False


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and _STARTED in os.environ:
    _become_spawned()
