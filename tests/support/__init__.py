"""What tests, campaigns and benchmarks share; see tests/README.md."""

from pathlib import Path

from tests.support import orders

ROOT = Path(__file__).resolve().parents[2]
# A schedule file: an order of v-cap at 0.625 of 1F1B's peak for unequal costs.
ORDER_FILE = str(ROOT / "tests" / "support" / "order.json")

orders.share()  # in every process of a test that imports anything from here
