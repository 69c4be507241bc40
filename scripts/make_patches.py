"""Writes the patch of a Megatron-LM release for ``git apply``: ``patches/<tag>/``.

    python -m scripts.make_patches core_v0.19.0 path/to/unmodified/Megatron-LM

For maintainers, when a release is added or the inserted lines change (megatron_ext/patching.py).
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import sys
from pathlib import Path

from megatron_ext.patching import FILE, PATCH_NAME, PatchError, insert, remove

ROOT = Path(__file__).resolve().parent.parent
HEADER = """Let megatron_ext add its flags (--pp-schedule ...) before Megatron parses its own.

Made by scripts/make_patches.py of megatron_ext; apply with `git apply`.

"""


def patch_text(before: bytes) -> str:
    """The patch for the unmodified text of ``FILE``, with full blob hashes as git writes them.

    Raises:
        PatchError: the lines do not fit, or are there already.
    """
    if remove(before) != before:
        raise PatchError(f"{FILE} is patched already")
    after = insert(before)
    hashes = [hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest() for text in (before, after)]
    sides = [text.decode().removesuffix("\n").split("\n") for text in (before, after)]
    lines = difflib.unified_diff(*sides, f"a/{FILE}", f"b/{FILE}", lineterm="")
    head = f"diff --git a/{FILE} b/{FILE}\nindex {hashes[0]}..{hashes[1]} 100644\n"
    return HEADER + head + "\n".join(lines) + "\n"


def main() -> int:
    """Write the patch that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write the patch of a Megatron-LM release.")
    parser.add_argument("tag", help="e.g. core_v0.19.0")
    parser.add_argument("checkout", type=Path, help="unmodified, at that tag")
    args = parser.parse_args()
    path = ROOT / "patches" / args.tag / PATCH_NAME
    try:
        text = patch_text((args.checkout / FILE).read_bytes())
    except (PatchError, OSError) as error:
        print(f"make_patches: {error}", file=sys.stderr)
        return 2
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
