"""What the CPU shim must make true of collectives; run as one of two ranks: RANK and a store file.

Exits non-zero with a traceback where something is not so.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import megatron_ext.cpu as cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main(rank: int, store: str) -> None:
    """Run all checks as ``rank`` of 2, meeting at the file ``store``."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=6),
        device_id=torch.device("cuda:0"),
    )
    dist.barrier(device_ids=[torch.cuda.current_device()])
    group = dist.new_group([0, 1], device_id=torch.device("cuda:0"))

    # Two workers of a group corrupt the heap.
    for each in (dist.group.WORLD, group):
        assert each._get_backend(torch.device("cpu")).options._threads == 1

    x = torch.full((4,), float(rank), device="cuda")
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [0.5] * 4, x
    x = torch.full((4,), float(rank))
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group, async_op=True)
    work.wait()
    work.wait()
    assert x.tolist() == [0.5] * 4, x
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 4, x

    # Parts of one and of two elements.
    for later in (False, True):
        parts = [torch.empty(1), torch.empty(2)]
        work = dist.all_gather(parts, torch.full((rank + 1,), float(rank)), group, later)
        if later:
            work.wait()
        assert [part.tolist() for part in parts] == [[0.0], [1.0, 1.0]], parts

    # Rank 0 keeps 1 and sends 2; rank 1 sends 3 and keeps 0.
    sends = torch.tensor([[1, 2], [3, 0]][rank])
    receives = torch.tensor([[1, 3], [2, 0]][rank])
    output = torch.empty(int(receives.sum()))
    dist.all_to_all_single(output, torch.full((3,), float(rank)), receives, sends)
    assert output.tolist() == [[0, 1, 1, 1], [0, 0]][rank], output

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
