"""A transfer engine that leaves ordering edges out, for tests that such a mistake is seen."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_ext.offload.engine import EDGES, Engine


class LeakyEngine(Engine):
    """Enforces all edges but those of ``skip``."""

    skip: Collection[str] = ()

    def _edge(self, name: str, event: Any) -> list[Any]:
        return [] if name in self.skip else super()._edge(name, event)

    def _compute_waits(self, name: str, event: Any) -> None:
        if name not in self.skip:
            super()._compute_waits(name, event)

    def _in_use(self, name: str, memory: Any) -> None:
        if name not in self.skip:
            super()._in_use(name, memory)


def leave_out(engine: Engine, edges: Collection[str]) -> None:
    """From now on ``engine`` does not enforce these edges."""
    assert set(edges) <= set(EDGES)
    leaky: Any = engine
    leaky.__class__, leaky.skip = LeakyEngine, edges
