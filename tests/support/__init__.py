"""What tests, campaigns and benchmarks share; see tests/README.md."""

from pathlib import Path

from tests.support import orders

ROOT = Path(__file__).resolve().parents[2]
# An order that CP-SAT found: megatron-ext schedule --schedule v-cap --memory-cap 0.625 --pp 4
# --microbatches 8 --cost 1,0.98,0.74,0.05 --optimize 12 --output optimized.json
OPTIMIZED = str(ROOT / "tests" / "support" / "optimized.json")

orders.share()  # in every process of a test that imports anything from here
