"""``plan --calibration``: a device's numbers, and published passes beside those they give."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..plan.calibration import Comparison, Summary, compare, devices, published, summary
from ..plan.gpu import Gpu
from ..view.table import columns
from . import plan_device
from .common import user_input


def show_calibration(args: argparse.Namespace) -> None:
    """Print it for the device that the arguments describe."""
    with user_input():
        data = calibration(plan_device.gpu(args))
    print(json.dumps(data) if args.json else _text(data))


def calibration(gpu: Gpu) -> dict[str, Any]:
    """The device's numbers with their sources, and comparisons where passes were published."""
    numbers = [
        {"name": name, "value": getattr(gpu, name), "source": source}
        for name, source in gpu.sources
    ]
    data: dict[str, Any] = {"gpu": gpu.name, "numbers": numbers, "notes": [], "comparisons": []}
    if gpu.name in devices():
        found = published(gpu.name)
        rows = compare(gpu, found["figures"])
        data["notes"] = found["notes"]
        data["comparisons"] = [each._asdict() | {"error": each.error} for each in rows]
        data["errors"] = [
            {"of": name, **summary(some)._asdict()} for name, some in _groups(rows).items()
        ]
    return data


def _groups(rows: list[Comparison]) -> dict[str, list[Comparison]]:
    """All that were fitted, all held out, and each source."""
    groups = {
        "fitted": [each for each in rows if each.fitted],
        "held out": [each for each in rows if not each.fitted],
    }
    for each in rows:
        groups.setdefault(each.source, []).append(each)
    return {name: some for name, some in groups.items() if some}


def _text(data: dict[str, Any]) -> str:
    lines = [data["gpu"], ""]
    lines += [
        f"{each['name']:13} {each['value']:<12.6g} {each['source']}" for each in data["numbers"]
    ]
    if not data["comparisons"]:
        return "\n".join([*lines, "", f"No passes measured on {data['gpu']} are published here."])
    lines += ["", *data["notes"], ""]
    cells = [["", "", "published", "ours", "our time", ""]]
    for source in dict.fromkeys(each["source"] for each in data["comparisons"]):
        cells.append([source, "", "", "", "", ""])
        cells += [_row(each) for each in data["comparisons"] if each["source"] == source]
    lines += [*columns(cells), "", *columns([_HEADS, *map(_error, data["errors"])])]
    return "\n".join(line.rstrip() for line in lines)


def _row(each: dict[str, Any]) -> list[str]:
    values = [f"{each[key]:.3f}" for key in ("published", "ours")]
    fitted = "fitted" if each["fitted"] else ""
    return [f"  {each['what']}", each["quantity"], *values, f"{each['error']:+.1%}", fitted]


_HEADS = ["our time is longer by", "number", *Summary._fields[1:]]


def _error(each: dict[str, Any]) -> list[str]:
    shares = [f"{each[key]:+.1%}" for key in ("mean", "worst")]
    return [each["of"], str(each["number"]), shares[0], f"{each['rms']:.1%}", shares[1]]
