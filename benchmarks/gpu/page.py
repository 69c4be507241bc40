"""The results of the GPU suite as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.row import beside, figures
from benchmarks.gpu.sliced import steps
from benchmarks.page import grid
from megatron_ext.plan.gpu import gpu_called


def page(parts: dict[str, dict[str, Any]], about: dict[str, Any]) -> str:
    """Markdown."""
    where = about["gpu"] or "no GPU"
    lines = [
        "# One GPU",
        "",
        f"`python -m benchmarks.gpu.run`, {about['date']}: {where}; Python {about['python']}, "
        f"torch {about['torch']}{'' if about.get('compiled', True) else ' without its compiler'}, "
        f"megatron-core {about['megatron']}, {about['machine']}.",
    ]
    if about["tiny"]:
        lines += [
            "",
            "**No GPU figure exists yet.** This is the suite with almost nothing to compute"
            + ("" if about["gpu"] else ", on the CPU")
            + ": it shows that every part runs to its end. The numbers below are no results.",
        ]
    problems = wrong(parts)
    if problems:
        lines += ["", "**Wrong**:", "", *(f"- {problem}" for problem in problems)]
    for name, result in parts.items():
        title, tables = SECTIONS[name]
        on = f", {result['device']}" if result.get("device") not in (None, about["gpu"]) else ""
        lines += ["", f"## {title}", "", f"{result['seconds']} s{on}.", ""]
        if "failed" in result:
            lines.append(f"**Failed**: {result['failed']}.")
        else:
            lines += tables(result, parts)
    return "\n".join(lines) + "\n"


def wrong(parts: dict[str, dict[str, Any]]) -> list[str]:
    """What must not be, one line each: failures, other results than 1F1B's, other sets than
    planned. Times are looked at by people."""
    found = [
        f"{name}: {part[key]}"
        for name, part in parts.items()
        for key in ("failed", "unfinished")
        if key in part
    ]
    for row in parts.get("overhead", {}).get("graphs", ()):
        if "failed" in row or not row.get("equal", True):
            found.append(f"overhead, {row['way']}: {row.get('failed', 'other losses')}")
    found += [f"tests: {failure}" for failure in parts.get("tests", {}).get("failures", ())]
    for part in ("replay", "wide"):
        for row in parts.get(part, {}).get("rows", ()):
            what = f"{part}, h {row['size']['hidden']}: {row['schedule']}"
            if "failed" in row:
                found.append(f"{what}: {row['failed']}")
            elif row["peak_sets"] != row["planned_sets"]:
                found.append(f"{what}: {row['peak_sets']} sets, planned {row['planned_sets']}")
    found += [
        f"slices: {row['tokens']} tokens, {row['slices']} {row['cut']}: other gradients"
        for row in parts.get("slices", {}).get("rows", ())
        if row["difference"] > 0.05
    ]
    found += [
        f"layers: {row['what']}: {row['failed']}"
        for row in parts.get("layers", {}).get("rows", ())
        if "failed" in row
    ]
    nccl = parts.get("nccl", {})
    found += unequal("nccl", nccl.get("schedules", ()))
    found += [
        f"nccl: memory grows: {memory}"
        for memory in nccl.get("memory", ())
        if memory["retries"] or memory["peak"] > 1.01 * memory["peak_early"]
    ]
    for world, result in parts.get("shared", {}).get("worlds", {}).items():
        where = f"shared, {world} processes"
        found += [f"{where}: {result[key]}" for key in ("failed", "unfinished") if key in result]
        found += unequal(where, result.get("rows", ()))
        if not result.get("learns", True):
            found.append(f"{where}: the loss never changed")
    return found


def unequal(where: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Schedules whose results are others than 1F1B's; only the control, if that is one: then the
    machine or the model does not compute the same twice, whatever the schedule."""
    found = []
    if not all(row.get("deterministic", True) for row in rows):
        found.append(f"{where}: torch was not asked for deterministic kernels")
    if any(row.get("control") and not row["equal"] for row in rows):
        text = "1f1b differs from itself, so nothing follows for the other schedules"
        return [*found, f"{where}: {text}"]
    names = (row["schedule"] for row in rows if not row["equal"])
    return [*found, *(f"{where}: {name} differs from 1f1b" for name in names)]


def _table(head: str, rows: Sequence[Sequence[Any]]) -> list[str]:
    """``head``: the columns, ``|`` between them."""
    return grid(head.split(" | "), rows)


def _gib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f}"


def _replay(result: dict[str, Any], _: Any) -> list[str]:
    lines = [
        "Of the rank with the most sets. *Work*: its passes alone, by events; *step*: until the "
        "device was done, without a peer to wait for. *Pipeline*: the whole step simulated from "
        "these passes, messages left out, and its speed against `1f1b`. *Copies*: a set to the "
        "host and back, at the rates measured before. Bytes in GiB: the "
        "allocator's peak above weights and gradients, which holds temporaries of a pass too; "
        "planned: the sets alone.",
        "",
    ]
    rows = []
    for row in result["rows"]:
        size = row["size"]
        name = f"h {size['hidden']}: {row['schedule']}"
        if "failed" in row:
            rows.append((name, f"failed: {row['failed']}", *[""] * 8))
            continue
        times = ", ".join(f"{key} {value:.2f}" for key, value in row["passes_ms"].items())
        sets = f"{row['peak_sets']} ({row['planned_sets']})"
        planned = row["planned_sets"] * row["set_bytes"]
        memory = _gib(row["allocator_bytes"]), _gib(planned)
        copies = " + ".join(f"{ms:.2f}" for ms in row["copy_ms"])
        speed = "" if row["speed"] is None else f"{row['speed']:.3f}"
        times_ms = (f"{row[key]:.1f}" for key in ("work_ms", "step_ms"))
        whole = f"{row['pipeline_ms']:.1f}"
        rows.append((name, times, copies, *times_ms, sets, *memory, whole, speed))
    head = "schedule | passes ms | copies ms | work ms | step ms | sets (planned) | allocator | "
    lines += _table(head + "planned | pipeline ms | speed", rows)
    return lines + _predicted(result, figures({"replay": result}, ""))


def _predicted(result: dict[str, Any], measured: list[dict[str, Any]]) -> list[str]:
    """Measured passes beside what the planner has for the device."""
    gpu = gpu_called(result.get("device") or "")
    predicted = [] if gpu is None else [ours for *_, ours in beside(gpu, measured)]
    rows = []
    for each in measured:
        for quantity, ms in each["published"].items():
            rows.append((each["what"], quantity, f"{ms:.3f}",
                         f"{predicted.pop(0):.3f}" if predicted else ""))  # fmt: skip
    text = "Milliseconds a layer, and what `megatron-ext plan` predicts for this device."
    return ["", text, "", *_table("layer | pass | measured | predicted", rows)]


def _layers(result: dict[str, Any], _: Any) -> list[str]:
    lines = [
        "One layer, all launched before it begins; its weight gradients are added to a float32 "
        "buffer. *Fused*: activations and dropout by Megatron's compiled functions.",
    ]
    lines += [
        f"- {row['what']}: failed: {row['failed']}" for row in result["rows"] if "failed" in row
    ]
    return lines + _predicted(result, figures({"layers": result}, ""))


def _shared(result: dict[str, Any], _: Any) -> list[str]:
    rows = []
    for world, found in result["worlds"].items():
        if why := found.get("failed") or found.get("unfinished"):
            rows.append((f"{world} processes", why, "", ""))
        for row in found.get("rows", ()):
            same = "equal" if row["equal"] else "**different**"
            name = row["schedule"] + (" again" if row["control"] else "")
            rows.append((f"{world}: {name}", same, row["moved_sets"], f"{row['step_ms']:.0f}"))
    lines = ["Losses of three steps and weights after them, bit for bit against `1f1b`.", ""]
    return lines + _table("schedule | losses and weights | sets moved a step | step ms", rows)


def _tests(result: dict[str, Any], _: Any) -> list[str]:
    if "skipped_all" in result:
        return [f"Not run: {result['skipped_all']}."]
    lines = [f"{result['passed']} passed, {len(result['failures'])} failed, "
             f"{result['skipped']} skipped."]  # fmt: skip
    lines += [f"- {failure}" for failure in result["failures"]]
    return lines + [f"- {name}: {value}" for name, value in result["shown"].items()]


def _rates(result: dict[str, Any], parts: dict[str, dict[str, Any]]) -> list[str]:
    rates = result["gb_per_s"]
    lines = _table("GB/s | alone | both ways at once", [
        ("to the host", f"{rates['to_host']:.1f}", f"{rates['to_host_together']:.1f}"),
        ("to the device", f"{rates['to_device']:.1f}", f"{rates['to_device_together']:.1f}"),
    ])  # fmt: skip
    rows = []
    for row in result["computing"]:
        rate = row["gb_per_s_each_way"]
        shown = "" if rate is None else f"{rate:.1f}"
        rows.append((row["case"], f"{row['ms']:.1f}", f"{row['tflops']:.1f}", shown))
    lines += ["", *_table("matrix products | ms | TFLOP/s | GB/s each way", rows)]
    rows = []
    for part in (parts[name] for name in ("replay", "wide") if "rows" in parts.get(name, {})):
        for row in part["rows"]:
            if row["schedule"] != "1f1b" or "failed" in row:
                continue
            k = k_of(row, part["to_host"], part["to_device"])
            rows.append((f"h {row['size']['hidden']}", f"{k['measured']:.2f}",
                         f"{k['formula']:.2f}", f"{k['bytes']:.1f}",
                         f"{k['tflops']:.0f}"))  # fmt: skip
    if rows:
        lines += [
            "",
            "k: the time of a set's copies to the host and back over F+B+W of its chunk; by the "
            "formula for the measured speeds and 20 bytes a token and hidden element.",
            "",
            *_table("layers | k measured | k by formula | bytes | TFLOP/s (formula's)", rows),
        ]
    return lines


def k_of(row: dict[str, Any], to_host: float, to_device: float) -> dict[str, float]:
    """k of a replay's 1F1B row: measured, and by the paper's formula for the measured speeds.

    Formula 1 of PipeOffload: 10 / (3 (6h + s)) x FLOP/s / bytes/s, for the 20 bytes a token and
    hidden element that are left after its cheap recomputation; ``bytes`` says how many they are
    here.
    """
    size = row["size"]
    hidden, seq, layers = size["hidden"], size["seq"], size["layers"]
    seconds = row["work_ms"] / 1e3 / size["microbatches"]
    flops = layers * 72 * seq * hidden**2 * (1 + seq / (6 * hidden)) / seconds
    way = 2 / (1 / to_host + 1 / to_device)
    set_bytes = row["set_bytes"]
    return {
        "measured": (set_bytes / to_host + set_bytes / to_device) / seconds,
        "formula": 10 / (3 * (6 * hidden + seq)) * flops / way,
        "bytes": set_bytes / (layers * seq * hidden),
        "tflops": flops / 1e12,
    }


def _slices(result: dict[str, Any], _: Any) -> list[str]:
    lines = [
        "One layer, one microbatch, its slices one after the other; milliseconds of all together. "
        "*Over whole*: F, B and W against the same microbatch in one slice with the same kernels. "
        "*Difference*: of a weight's gradient to that of the whole, relative, the largest.",
        "",
    ]
    rows, whole = [], 1.0
    for row in result["rows"]:
        sums = [sum(row["ms"][op]) for op in "FBW"]
        if row["lengths"] == [row["tokens"]]:
            whole = sum(sums) or 1.0
        lengths = " to ".join(map(str, sorted({min(row["lengths"]), max(row["lengths"])})))
        rows.append((f"h {row['hidden']}, {row['tokens']} tokens: {row['slices']} {row['cut']}",
                     lengths, *(f"{each:.2f}" for each in sums), f"{sum(sums) / whole:.3f}",
                     f"{row['difference']:.1e}"))  # fmt: skip
    head = "slices | lengths | F | B | W | over whole | difference"
    lines += _table(head, rows)
    rows, base = [], dict[tuple[str, int], float]()
    for what, name, m, step, peak in steps(result["rows"]):
        first = base.setdefault((what.partition(":")[0], m), step)
        rows.append((what, m, name, f"{step:.1f}", f"{first / step:.2f}", f"{peak:.2f}"))
    if not rows:
        return lines
    text = (
        "Whole steps of 8 ranks, simulated from these passes, each rank with one layer (half a "
        "layer in each of two chunks), without messages. *Speed* is against `1f1b` of whole "
        "microbatches with the same kernels; *peak* in whole microbatches."
    )
    head = "tokens: slices | microbatches | schedule | step ms | speed | peak"
    return [*lines, "", text, "", *_table(head, rows)]


def _overhead(result: dict[str, Any], _: Any) -> list[str]:
    lines = [
        "Microseconds per action of a rank's list, messages included. *Host*: issuing a step of "
        "16 tokens and hidden 256 under the executor, the least of all rounds; *of it CPU*: of all "
        "threads; *alone*: the same passes in a plain loop; *keeps up*: the device was done at "
        "most half as much later; *device*: the passes at the real size.",
        "",
    ]
    rows = []
    for row in result["rows"]:
        keeps_up, bound = ("yes" if row[k] else "no"
                           for k in ("device_keeps_up", "bound_by_launching"))  # fmt: skip
        rows.append((f"h {row['hidden']}, seq {row['seq']}: {row['schedule']}", row["actions"],
                     *(f"{row[k]:.0f}" for k in ("host_us", "cpu_us", "alone_us", "device_us")),
                     keeps_up, bound))  # fmt: skip
    head = "schedule | actions | host | of it CPU | alone | device | keeps up | bound by launching"
    lines += _table(head, rows)
    rows = []
    for row in result.get("graphs", ()):
        if why := row.get("skipped") or row.get("failed"):
            rows.append((row["way"], why, "", ""))
            continue
        same = "equal" if row["equal"] else "**different**"
        rows.append((row["way"], f"{row['host_us']:.0f}", f"{row['step_us']:.0f}", same))
    if not rows:
        return lines
    text = (
        "`1f1b` at the small size, microseconds an action: issuing, and until the device is done."
    )
    return [*lines, "", text, "", *_table("way | host | step | losses", rows)]


def _moe(result: dict[str, Any], _: Any) -> list[str]:
    messages = "by NCCL" if result["ranks"] > 1 else "emulated, on one multiprocessor"
    products = "grouped (Transformer Engine)" if result["grouped"] else (
        "one expert after the other, and stock's permutation waits for the host: without "
        "Transformer Engine a speed-up is not what training has"
    )  # fmt: skip
    lines = [
        f"{result['tokens']} tokens a rank; messages {messages}; products {products}. Forward and "
        "backward of one layer; peak bytes beside parameters and gradients with two calls in "
        "flight. *Speed* is against stock and against stock with `--recompute-modules moe`.",
        "",
    ]
    rows, base = [], dict[str, dict[str, float]]()
    for row in result["rows"]:
        of = base.setdefault(row["shape"], {})
        of[row["way"]] = row["ms"]
        speeds = [f"{of[way] / row['ms']:.3f}" if way in of else "" for way in _BASES]
        name = f"{row['shape']}: {row['way']}"
        rows.append((name, f"{row['ms']:.2f}", *speeds, _gib(row["peak_bytes"])))
    return lines + _table("layer and way | ms | speed | over recompute | peak GiB", rows)


_BASES = ("stock", "recompute")


# Section of the NCCL part -> what CPU ranks have shown, and what a GPU would show beyond it.
_SHOWN = {
    "schedules": "CPU ranks: bit for bit over gloo, and with NCCL's rules emulated. A GPU shows "
    "whether NCCL's streams and the allocator leave it so.",
    "messages": "CPU ranks: two ways pass each other with a communicator for each (simulated: a "
    "shared one costs up to a third of the step). A GPU shows what a message and `ctas` cost.",
    "computing": "CPU ranks show nothing of this. A GPU shows how many multiprocessors a posted "
    "receive takes from matrix products while it waits for its peer. Where `edge` takes more than "
    "2 % within a node and `edge,ctas=4` does not, give `--pp-p2p edge,ctas=4`.",
    "held": "CPU ranks show nothing of this. How many received messages stay allocated, used by "
    "nothing any more, until the next one of their sender comes.",
    "memory": "CPU ranks: messages are released where the schedule proves receipt. A GPU shows "
    "that the allocator's peak stays as it is while the host runs ahead.",
}


def _nccl(result: dict[str, Any], _: Any) -> list[str]:
    if "skipped" in result:
        return [f"Not run: {result['skipped']}."]
    lines = [f"Two processes over {result['backend']}, {result['size']}."]
    for name, text in _SHOWN.items():
        rows = result.get(name)
        if rows is None:
            continue
        cells = [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
        lines += ["", f"### {name.capitalize()}", "", text, "", *_table(" | ".join(rows[0]), cells)]
    return lines


SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any], Any], list[str]]]] = {
    "tests": ("Tests", _tests),
    "shared": ("Processes that share the GPU", _shared),
    "replay": ("One rank of a pipeline", _replay),
    "rates": ("Transfers", _rates),
    "slices": ("Slices of a sequence", _slices),
    "overhead": ("Executor overhead with real kernels", _overhead),
    "moe": ("MoE layers", _moe),
    "layers": ("Layers of models that people train", _layers),
    "wide": ("One rank of a pipeline of wide layers", _replay),
    "nccl": ("Messages by NCCL", _nccl),
}
