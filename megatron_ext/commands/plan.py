"""``plan``: from a model, a device and a memory budget to flags."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .._input import attribute, parse_bytes
from ..plan.flags import FLAGS, add_flags, job_of, notes_on, read
from ..plan.gpu import GPUS, Gpu, gpu_of
from ..plan.model import Job, PlanError
from ..plan.profile import Profile
from ..plan.search import Result, Search
from ..plan.space import SearchSpace
from ..schedule import NAMES, save
from ..schedule.link import DEFAULT_POLICY, POLICIES
from .common import (
    InputError,
    Parser,
    add_network_options,
    network_of,
    output,
    positive,
    user_input,
)
from .plan_k import add_tables
from .plan_report import report_json, report_text

_HELP = """
The model and how it is divided are given as Megatron's own flags, as pretrain_gpt.py has them
(--num-layers, --hidden-size, --num-attention-heads, --seq-length, --swiglu, --num-experts,
--multi-latent-attention, --mtp-num-layers, --hybrid-layer-pattern, --tensor-model-parallel-size,
--world-size, --global-batch-size, --use-distributed-optimizer, --optimizer, --bf16, --fp8-format,
--fp8-param-gather, --recompute-activations, ...), or with --from-args as a whole command line.
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan", help="from a model, a device and a memory budget to flags", description=_HELP
    )
    parser.add_argument(
        "--from-args", metavar="LINE", help="a pretrain_gpt.py command line; what plan does not "
        "know is ignored and listed; flags beside it win"
    )  # fmt: skip
    add_flags(parser.add_argument_group("model and division"))
    _add_device(parser)
    group = parser.add_argument_group("what is searched")
    group.add_argument("--pp", type=positive, metavar="P", help="pipeline ranks")
    group.add_argument(
        "--microbatches", type=positive, metavar="M", help="of one iteration with the job's own "
        "--micro-batch-size, in place of --global-batch-size"
    )  # fmt: skip
    group.add_argument(
        "--schedules", metavar="A,B", help=f"of {', '.join(NAMES)} (default all of them)"
    )
    group.add_argument("--chunks", metavar="V,V", help="model chunks per rank (default 2,4)")
    group.add_argument(
        "--micro-batch-sizes", metavar="B,B", help="default 1, 2, 4 and the job's own, as far as "
        "they divide the batch"
    )  # fmt: skip
    group.add_argument(
        "--cheap-recompute", choices=("auto", "on", "off"), help="default auto: with and without"
    )
    group.add_argument(
        "--offload", choices=("auto", "half", "full", "any", "off"), help="default any: half and "
        "full, or auto for links too slow for those, where that may be faster than what fits"
    )  # fmt: skip
    group.add_argument("--offload-transfer", choices=POLICIES, default=DEFAULT_POLICY)
    group.add_argument(
        "--no-balance", action="store_true", help="keep Megatron's even split of the layers"
    )
    group.add_argument(
        "--effort", type=float, default=1.0, metavar="X", help="a factor on the 2 million passes "
        "of all orders that are made, about half a minute at 32 ranks and 256 microbatches"
    )  # fmt: skip
    add_network_options(group)
    parser.add_argument("--output", metavar="FILE", help="write the chosen schedule to FILE.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_plan)
    add_tables(parser, _gpu, _tokens)


def _add_device(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device and budget")
    group.add_argument("--gpu", default="H100", help=f"{', '.join(GPUS)} (default H100)")
    group.add_argument(
        "--memory-cap", metavar="BYTES", help="what one rank may hold on its device, such as "
        "40GiB; default: the device's memory less the reserve"
    )  # fmt: skip
    group.add_argument(
        "--reserve", default="6GiB", metavar="BYTES", help="for libraries, communicators and "
        "fragmentation, if there is no --memory-cap (default 6GiB)"
    )  # fmt: skip
    group.add_argument("--host-memory", metavar="BYTES", help="for one rank's offloaded sets")
    group.add_argument("--gpu-flops", type=float, metavar="X", help="peak dense 16-bit FLOP/s")
    group.add_argument("--gpu-memory", metavar="BYTES", help="of the device")
    group.add_argument("--gpu-bandwidth", type=float, metavar="X", help="of its memory, bytes/s")
    group.add_argument(
        "--host-bandwidth", metavar="X[,X2]", help="to the host, and back, bytes/s, such as 25e9"
    )
    group.add_argument("--peer-bandwidth", type=float, metavar="X", help="in a node, bytes/s")
    group.add_argument("--network-bandwidth", type=float, metavar="X", help="bytes/s each way")
    group.add_argument(
        "--efficiency", type=float, metavar="X", help="share of the peak that large matrix "
        "products reach"
    )  # fmt: skip
    group.add_argument(
        "--profile", action="append", metavar="FILE", help="measured times, bytes and rates in "
        "place of computed ones; one for each microbatch size and recompute setting"
    )  # fmt: skip


def _plan(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    with user_input():
        tokens = _tokens(args.from_args)
        given, ignored = read(tokens)
        own = {n: v for n, v in vars(args).items() if n in _KNOWN}
        given.update(own)
        if args.pp is not None:
            given["pipeline_model_parallel_size"] = args.pp
        job, gpu = job_of(given), _gpu(args)
        space = _space(args, job, gpu, "micro_batch_size" in given)
        budget = _budget(args, gpu)
        host = None if args.host_memory is None else parse_bytes(args.host_memory)
        if args.effort <= 0:
            raise PlanError(f"--effort must be > 0, got {args.effort}")
        if args.output is not None and not args.output.endswith(".json"):
            raise InputError(f"--output {args.output}: a schedule file's name ends in .json")
        with _progress() as progress:
            result = Search(space, budget, host, args.effort, progress).run()
    notes = [*job.assumptions, *notes_on(ignored)]
    seconds = time.perf_counter() - started
    if args.output is not None and result.best is not None:
        _save(args.output, result)
    data = report_json(result, space, ignored, notes, seconds, args.output)
    print(json.dumps(data) if args.json else report_text(data, args.output))


_KNOWN = {attribute(name) for name in FLAGS}


def _tokens(line: str | None) -> list[str]:
    try:
        return [] if line is None else shlex.split(line.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"--from-args cannot be split into words: {error}") from None


def _gpu(args: argparse.Namespace) -> Gpu:
    there: float | None = None
    back: float | None = None
    if args.host_bandwidth is not None:
        parts = args.host_bandwidth.split(",")
        try:
            there, back = float(parts[0]), float(parts[-1])
        except ValueError:
            there = None
        if there is None or len(parts) > 2:
            raise PlanError(
                f"--host-bandwidth must be X or X,X2 in bytes/s, got {args.host_bandwidth!r}"
            )
    return gpu_of(args.gpu).with_(
        flops=args.gpu_flops,
        memory_bytes=None if args.gpu_memory is None else parse_bytes(args.gpu_memory),
        bandwidth=args.gpu_bandwidth,
        to_host=there,
        to_device=back,
        peer=args.peer_bandwidth,
        network=args.network_bandwidth,
        efficiency=args.efficiency,
    )


def _budget(args: argparse.Namespace, gpu: Gpu) -> int:
    if args.memory_cap is not None:
        return parse_bytes(args.memory_cap)
    budget = gpu.memory_bytes - parse_bytes(args.reserve)
    if budget <= 0:
        raise PlanError(f"--reserve {args.reserve} leaves nothing of {gpu.name}'s memory")
    return budget


def _space(args: argparse.Namespace, job: Job, gpu: Gpu, own_size: bool) -> SearchSpace:
    pp = job.pipeline_model_parallel_size
    if pp < 2:
        raise PlanError(f"a pipeline needs at least 2 ranks, got --pp {pp}; give 2 or more")
    if args.microbatches is not None:
        if job.global_batch_size is not None:
            raise PlanError("--microbatches and --global-batch-size both give the batch; drop one")
        batch = args.microbatches * job.micro_batch_size * job.data_parallel_size
        job = job.with_(global_batch_size=batch)
    job.microbatches()  # refuses what cannot be divided
    names = tuple(args.schedules.split(",")) if args.schedules else NAMES
    for name in names:
        if name not in NAMES:
            raise PlanError(f"unknown schedule {name!r}; give some of {', '.join(NAMES)}")
    profiles = {}
    for path in args.profile or ():
        profile = Profile.load(path)
        size, cheap = profile.micro_batch_size, profile.cheap_recompute
        profile.require(job.with_(micro_batch_size=size, cheap_recompute=cheap))
        profiles[profile.micro_batch_size, profile.cheap_recompute] = profile
    return SearchSpace(
        job,
        gpu,
        pp,
        names,
        _numbers(args.chunks, "--chunks") or _chunks(job),
        _sizes(args, job, profiles),
        _recompute(args, job),
        {None: _ANY, "any": _ANY, "off": ()}.get(args.offload, (args.offload,)),
        args.offload_transfer,
        not args.no_balance,
        profiles,
        network_of(args),
    )


def _chunks(job: Job) -> tuple[int, ...]:
    pp = job.pipeline_model_parallel_size
    return tuple(v for v in (2, 4) if v == 2 or v * pp <= job.num_layers)


def _sizes(
    args: argparse.Namespace, job: Job, profiles: dict[tuple[int, bool], Profile]
) -> tuple[int, ...]:
    given = _numbers(args.micro_batch_sizes, "--micro-batch-sizes")
    if given is not None:
        return given
    if profiles:
        return tuple(sorted({size for size, _ in profiles}))
    assert job.global_batch_size is not None
    share = job.global_batch_size // job.data_parallel_size
    return tuple(b for b in sorted({1, 2, 4, job.micro_batch_size}) if share % b == 0)


def _recompute(args: argparse.Namespace, job: Job) -> tuple[bool, ...]:
    if args.cheap_recompute in (None, "auto"):
        if job.recompute_granularity == "full":
            return (False,)
        return (True,) if job.cheap_recompute else (False, True)
    if args.cheap_recompute == "on" and job.recompute_granularity == "full":
        raise PlanError("--cheap-recompute on has nothing to do under full recomputation")
    return (args.cheap_recompute == "on",)


def _numbers(text: str | None, flag: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise PlanError(f"{flag} must be whole numbers >= 1 such as 1,2,4, got {text!r}")
    return numbers


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Lines on stderr, once it takes long, and not too many."""
    last = time.monotonic()
    reported = False

    def report(line: str) -> None:
        nonlocal last, reported
        if time.monotonic() - last > _EVERY_S:
            last, reported = time.monotonic(), True
            print(f"plan: {line}", file=sys.stderr, flush=True)

    yield report
    if reported:
        print("plan: done", file=sys.stderr, flush=True)


_EVERY_S = 4.0
_ANY = ("half", "full", "auto")


def _save(path: str, result: Result) -> None:
    assert result.best is not None
    schedule = result.best.schedule()
    with output(path):
        Path(path).touch()
        save(schedule, path)
