"""What tests, campaigns and benchmarks share; see tests/README.md."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An order that CP-SAT found; its command is in it.
OPTIMIZED = str(ROOT / "tests" / "support" / "optimized.json")
