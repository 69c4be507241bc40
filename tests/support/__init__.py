"""What tests, campaigns and benchmarks share; see tests/README.md."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
