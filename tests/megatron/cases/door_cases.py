"""Opens the library's and the patches' doors on a Megatron; prints one JSON object.

python door_cases.py [PATCHED_CHECKOUT]      default: the installed megatron-core
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import megatron_ext

out: dict[str, Any] = {}
out["loaded_by_import"] = [m for m in ("torch", "megatron") if m in sys.modules]

from megatron_ext import cpu  # noqa: E402

cpu.install()
checkout = sys.argv[1] if len(sys.argv) > 1 else None
if checkout is not None:
    sys.path.insert(0, checkout)
from megatron.training import arguments  # noqa: E402


def parse(*argv: str) -> Any:
    """What Megatron makes of a command line."""
    sys.argv = ["pretrain_gpt.py", *argv]
    with contextlib.redirect_stdout(io.StringIO()):
        return arguments.parse_args()


def error_of(do: Callable[[], Any]) -> str:
    """Type and text of what ``do`` raises."""
    try:
        do()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def library() -> None:
    """A script of one's own."""
    early = parse()
    out["stock_knows_flag"] = hasattr(early, "pp_schedule")
    out["unasked_loaded"] = "megatron_ext.integration" in sys.modules
    from tests.megatron.cases.hook_cases import megatron_symbols

    symbols = megatron_symbols()
    out["unknown"] = error_of(lambda: megatron_ext.apply({"pp_shedule": "v-half"}))
    out["same_after_refusal"] = megatron_symbols() == symbols
    report = megatron_ext.apply({"pp_schedule": "v-half", "pp_profile_steps": 3, "pp_trace": None})
    out["report"], out["hooks"] = str(report), report.hooks
    out["version"] = report.megatron
    args = parse()
    out["from_config"] = [args.pp_schedule, args.pp_profile_steps, args.pp_trace]
    out["command_line_wins"] = parse("--pp-schedule", "zb-h1").pp_schedule
    out["twice"] = error_of(megatron_ext.apply)
    out["again"] = megatron_ext.apply(exist_ok=True).hooks == report.hooks
    out["again_with_config"] = error_of(lambda: megatron_ext.apply({"pp_cost": "1"}, exist_ok=True))
    out["parsed_before"] = error_of(lambda: arguments.validate_args(early))
    megatron_ext.revert()
    megatron_ext.revert()
    out["same_after_revert"] = megatron_symbols() == symbols
    out["report_after_revert"] = str(report)


def patched() -> None:
    """The inserted lines of a patched checkout."""
    from tests.megatron.cases.hook_cases import megatron_symbols

    symbols = megatron_symbols()
    flags = ("--pp-schedule", "v-half")
    out["patched_parses"] = [parse(*flags).pp_schedule, parse(*flags).pp_schedule]
    out["patched_hooks"] = megatron_ext.apply(exist_ok=True).hooks
    megatron_ext.revert()
    out["patched_same_after_revert"] = megatron_symbols() == symbols

    from megatron_ext.integration import install

    installation = install(flags)
    out["patched_under_launcher"] = parse(*flags).pp_schedule
    out["hooks_under_launcher"] = len(installation.hooks.bindings) if installation else 0
    megatron_ext.revert()

    sys.modules["megatron_ext"] = None  # type: ignore[assignment]  # cannot be imported
    out["missing"] = error_of(lambda: parse(*flags))
    out["missing_unasked"] = error_of(parse)
    out["missing_same"] = megatron_symbols() == symbols


library()
if checkout is not None:
    patched()
print("RESULT " + json.dumps(out))
