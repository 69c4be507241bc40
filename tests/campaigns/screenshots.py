"""Pictures of ``explore`` for the documentation: ``python -m tests.campaigns.screenshots``.

Writes ``docs/images/explore-WIDTH-THEME.png`` of the first view, in a desktop's and a phone's
width, light and dark. Needs chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from megatron_ext.commands.explore.answers import Explorer
from megatron_ext.commands.explore.server import serve
from tests.support import ROOT
from tests.support.browser import browser, missing

SIZES = ((1280, 900), (390, 844))
READY = "document.getElementById('status').textContent.startsWith('all schedules')"


def main() -> int:
    """Write the pictures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    folder: Path = parser.parse_args().folder
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    server = serve(Explorer(), 0, fallback=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with browser() as window:
        for width, height in SIZES:
            for theme in ("light", "dark"):
                window.size(width, height)
                window.dark(theme == "dark")
                window.open("about:blank")
                window.open(f"http://127.0.0.1:{server.server_port}/")
                window.wait(f"{READY} && viewer.width > 0 && !viewer.waiting")
                # How long the answer took is not of the page.
                window.run("show('all schedules')")
                path = folder / f"explore-{width}-{theme}.png"
                path.write_bytes(window.picture(whole=True))
                print(path)
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
