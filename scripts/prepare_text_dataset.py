#!/usr/bin/env python3
"""Turn a directory of text files into a Megatron dataset of bytes. Needs no GPU.

    python scripts/prepare_text_dataset.py --input docs/ src/ --output data/text --max-mb 20

writes data/text.bin and data/text.idx through megatron-core's own IndexedDatasetBuilder: one
document per file, one token per byte (0..255), each document closed by end-of-document (256).
data/text.json records what went in; run again with the same options, the script does nothing.

Train on it with

    --data-path data/text --tokenizer-type NullTokenizer --vocab-size 257
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

END_OF_DOCUMENT = 256
FORMAT = "megatron-ext-bytes/1"
DEFAULT_GLOBS = ["*.txt", "*.md", "*.rst", "*.py"]
DEFAULT_EXCLUDED = ["site-packages", "__pycache__", "node_modules", ".git"]
# Seconds between two lines of progress.
PROGRESS_S = 2.0


class DatasetError(Exception):
    """The dataset cannot be made; the message is one sentence for the user."""


def find_files(directories: list[Path], globs: list[str], excluded: list[str]) -> list[Path]:
    """Return the files below ``directories`` whose name matches one of ``globs``.

    The order depends on names only (directories as given, then by path), so that the same tree
    gives the same dataset on every machine. Directories named in ``excluded`` and links to
    directories are not entered.

    Raises:
        DatasetError: a directory does not exist, or nothing matches.
    """
    files: list[Path] = []
    for directory in directories:
        if not directory.is_dir():
            raise DatasetError(f"the input directory {directory} does not exist.")
        found: list[Path] = []
        for root, folders, names in os.walk(directory):
            folders[:] = [folder for folder in folders if folder not in excluded]
            matching = (n for n in names if any(fnmatch.fnmatch(n, glob) for glob in globs))
            found += [Path(root, name) for name in matching]
        files += sorted(found, key=lambda path: path.relative_to(directory).as_posix())
    if not files:
        where = ", ".join(str(directory) for directory in directories)
        raise DatasetError(f"no file below {where} matches {' '.join(globs)}; see --glob.")
    return files


def read_texts(files: list[Path]) -> Iterator[bytes | None]:
    """Yield each file's bytes, or None where it is empty, unreadable or not UTF-8 text."""
    for path in files:
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            yield None
            continue
        yield content if content and b"\0" not in content else None


def write_dataset(files: list[Path], prefix: Path, max_bytes: float) -> dict[str, int]:
    """Write ``prefix``.bin and .idx and return the numbers of documents, tokens, skipped files.

    Both appear complete or not at all. Stops before the first file that would exceed
    ``max_bytes`` of text.

    Raises:
        DatasetError: no text was found.
        ImportError: megatron-core is not installed.
    """
    import numpy as np
    import torch

    with warnings.catch_warnings():
        # That Transformer Engine and Apex are missing does not matter here.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = {suffix: Path(f"{prefix}.{os.getpid()}.tmp{suffix}") for suffix in (".bin", ".idx")}
    counts = {"documents": 0, "tokens": 0, "skipped": 0}
    size_bytes, last_report = 0, time.monotonic()
    try:
        builder = IndexedDatasetBuilder(str(partial[".bin"]), dtype=np.uint16)
        for number, content in enumerate(read_texts(files), start=1):
            if content is None:
                counts["skipped"] += 1
                continue
            if size_bytes + len(content) > max_bytes:
                break
            tokens = np.append(np.frombuffer(content, np.uint8).astype(np.int32), END_OF_DOCUMENT)
            builder.add_item(torch.from_numpy(tokens.astype(np.int32)))
            builder.end_document()
            size_bytes += len(content)
            counts["documents"] += 1
            counts["tokens"] += len(tokens)
            if time.monotonic() - last_report > PROGRESS_S:
                last_report = time.monotonic()
                report = f"{number} of {len(files)} files, {size_bytes / 1e6:.1f} MB"
                print(f"prepare_text_dataset: {report}", flush=True)
        if not counts["documents"]:
            raise DatasetError(
                f"none of {len(files)} files is text of at most {max_bytes / 1e6:g} MB."
            )
        builder.finalize(str(partial[".idx"]))
        # The index last: whoever finds it finds the tokens too.
        for suffix, path in partial.items():
            os.replace(path, f"{prefix}{suffix}")
    finally:
        for path in partial.values():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return counts


def is_done(prefix: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of an earlier run that made just what ``request`` asks for, or None."""
    try:
        record = json.loads(Path(f"{prefix}.json").read_text())
        size_bytes = Path(f"{prefix}.bin").stat().st_size
        Path(f"{prefix}.idx").stat()
    except (OSError, ValueError):
        return None
    same = record.get("request") == request and record.get("size_bytes") == size_bytes
    return record if same else None


def main() -> int:
    """Run the command line; return the exit status (2: a mistake of the user's)."""
    parser = argparse.ArgumentParser(
        description="Turn a directory of text files into a Megatron dataset of bytes.",
        epilog="Train with --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257.",
    )
    parser.add_argument("--input", nargs="+", required=True, type=Path, metavar="DIR")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX")
    parser.add_argument("--glob", nargs="+", default=DEFAULT_GLOBS, metavar="GLOB")
    parser.add_argument(
        "--exclude",
        nargs="*",
        default=DEFAULT_EXCLUDED,
        metavar="NAME",
        help="folders to leave out",
    )
    parser.add_argument("--max-mb", type=float, default=float("inf"), help="MB = 10^6 bytes")
    options = parser.parse_args()
    request = {
        "format": FORMAT,
        "input": [str(directory.resolve()) for directory in options.input],
        "glob": options.glob,
        "exclude": options.exclude,
        "max_mb": None if options.max_mb == float("inf") else options.max_mb,
    }
    record = is_done(options.output, request)
    if record is not None:
        print(f"prepare_text_dataset: {options.output}.bin is there: {record['tokens']} tokens")
        return 0
    try:
        files = find_files(options.input, options.glob, options.exclude)
        counts = write_dataset(files, options.output, options.max_mb * 1e6)
    except (DatasetError, OSError) as error:
        print(f"prepare_text_dataset: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(
            f"prepare_text_dataset: {error}; run it with the Python that has megatron-core, "
            "for example that of scripts/test.sh",
            file=sys.stderr,
        )
        return 2
    size_bytes = Path(f"{options.output}.bin").stat().st_size
    record = {"request": request, "size_bytes": size_bytes, **counts}
    Path(f"{options.output}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"prepare_text_dataset: {options.output}.bin: {counts['documents']} documents, "
        f"{counts['tokens']} tokens, {counts['skipped']} files skipped"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
