"""torch.distributed.pipelining's CSV form against torch itself."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from megatron_ext.schedule.generators import GENERATORS, NAMES, generate
from megatron_ext.schedule.io import from_csv, to_csv


@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_what_we_write_and_we_what_torch_writes(name):
    schedule = generate(name, 4, 8)
    rows = [line.split(",") for line in to_csv(schedule).splitlines()]
    # As in PipelineScheduleMulti._load_csv.
    actions = {r: [schedules._Action.from_str(cell) for cell in row] for r, row in enumerate(rows)}
    chunks = 2 if GENERATORS[name].placement == "vee" else GENERATORS[name].default_chunks
    placement = schedules._validate_schedule(actions, 4, 4 * chunks, 8)
    assert placement == {s: schedule.placement.rank_of(s) for s in range(4 * chunks)}
    text = "\n".join(",".join(str(a or "") for a in row) for row in actions.values())
    assert from_csv(text).fingerprint() == schedule.fingerprint()
