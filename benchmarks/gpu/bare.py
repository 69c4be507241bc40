#!/usr/bin/env python3
"""The GPU suite on a bare machine: torch, a folder with megatron-core's wheel, and this checkout.

    python3 benchmarks/gpu/bare.py WHEELS OUT [options of benchmarks.gpu.run, as --parts a,b]

Needs no network, no git and no installation: the wheel is unpacked beside the temporary files. A
second run with the same OUT does what the first did not. All of it ends within eight minutes on one
H100 (``--seconds`` says otherwise); what is done by then is in OUT, whatever ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 470

# The first call of a MoE layer would compile for seconds.
SETTINGS = {
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def main() -> int:
    """Returns the suite's exit status."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    wheels, out = (Path(word).resolve() for word in sys.argv[1:3])
    found = sorted(wheels.glob("megatron_core-*.whl"))
    if len(found) != 1:
        print(f"{wheels} has {len(found)} wheels of megatron-core; it must have one",
              file=sys.stderr)  # fmt: skip
        return 2
    with tempfile.TemporaryDirectory() as site:
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(site)
        path = os.pathsep.join([str(ROOT), site, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.gpu.run", "--rest", "--output", str(out)]
        command += [] if "--tiny" in sys.argv else ["--seconds", str(SECONDS)]
        command += sys.argv[3:]
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
        suite = subprocess.Popen(command, env=environment)

        def pass_on(number: int, _: object) -> None:
            os.kill(suite.pid, number)  # it ends its parts, and so the wait below

        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, pass_on)
        return suite.wait()


if __name__ == "__main__":
    sys.exit(main())
