"""Makes the patch series of one Megatron-LM version: ``patches/<tag>/`` with its manifest.

    python -m scripts.make_patches core_v0.19.0 path/to/unmodified/Megatron-LM

For maintainers, when a Megatron version is added or the inserted text changes. The text is here
once; it is the same for every version.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

from megatron_ext.patching import (
    FORMAT,
    MANIFEST,
    PatchError,
    blob_hash,
    load,
    read_version,
)

ROOT = Path(__file__).resolve().parent.parent
NAME = "0001-ask-megatron_ext-for-its-flags.patch"
FILE = "megatron/training/arguments.py"
# Every training script of every version parses its command line with this function.
ANCHOR = '''def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    """Parse all arguments."""
'''
# Prefixes rather than names: flags that megatron_ext gains must not need new patches. No flag of
# Megatron's own begins so in any supported version (a test looks).
PREFIXES = ("--pp-", "--moe-pipeline-", "--moe-memory-")
INSERTED = f"""    # megatron_ext: only if one of its flags is on the command line.
    import sys
    ours = {PREFIXES!r}
    asked = [arg for arg in sys.argv[1:] if arg.startswith(ours)]
    if asked:
        try:
            import megatron_ext
        except ImportError as error:
            sys.exit(f'{{asked[0]}} needs megatron_ext ({{error}}): install it or drop this flag.')
        megatron_ext.apply(exist_ok=True)

"""
HEADER = """Let megatron_ext add its flags (--pp-schedule ...) before Megatron parses its own.

Made by scripts/make_patches.py of megatron_ext; apply with `git apply`.

"""


def make(tag: str, checkout: Path, folder: Path) -> None:
    """Write the series for ``checkout``, which must be unmodified, to ``folder``.

    Raises:
        PatchError: the place to patch is not there, or patched already.
    """
    before = (checkout / FILE).read_bytes().decode()
    if before.count(ANCHOR) != 1 or INSERTED in before:
        raise PatchError(f"{checkout / FILE} has no place for the patch, or has the patch")
    after = before.replace(ANCHOR, ANCHOR + INSERTED)
    hashes = {"before": blob_hash(before.encode()), "after": blob_hash(after.encode())}
    lines = difflib.unified_diff(
        before.split("\n"),
        after.split("\n"),
        f"a/{FILE}",
        f"b/{FILE}",
        lineterm="",
    )
    newline = "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(
        f"{HEADER}diff --git a/{FILE} b/{FILE}\n"
        f"index {hashes['before']}..{hashes['after']} 100644\n{newline.join(lines)}\n",
        encoding="utf-8",
    )
    manifest = {
        "format": FORMAT,
        "tag": tag,
        "version": read_version(checkout),
        "patches": [NAME],
        "files": {FILE: hashes},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Make the patch series of a Megatron-LM version.")
    parser.add_argument("tag", help="e.g. core_v0.19.0")
    parser.add_argument("checkout", type=Path, help="unmodified, at that tag")
    args = parser.parse_args()
    folder = ROOT / "patches" / args.tag
    try:
        make(args.tag, args.checkout, folder)
    except (PatchError, OSError) as error:
        print(f"make_patches: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {len(load(folder).patches)} patch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
