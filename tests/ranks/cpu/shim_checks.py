"""What the CPU shim must make true; run as a program, because the shim changes its process.

Prints one JSON object: name of each ``check_*`` function -> null, or what went wrong.
"""

from __future__ import annotations

import json
import threading
import traceback

import megatron_ext.cpu as cpu


def check_factories_take_cuda() -> None:
    import torch

    devices = ("cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0)
    for device in devices:
        assert torch.empty(2, device=device).device.type == "cpu"
        assert torch.tensor([1.0], device=device).device.type == "cpu"
        assert torch.arange(3, device=device).sum() == 3
        assert torch.zeros(1).new_ones(2, device=device).device.type == "cpu"
        assert torch.zeros_like(torch.ones(1), device=device).device.type == "cpu"
    assert not torch.empty(2, pin_memory=True).is_pinned()
    assert torch.empty(2, device="meta").device.type == "meta"


def check_device_contexts() -> None:
    import torch

    with torch.device("cuda"):
        assert torch.ones(2).device.type == "cpu"
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
        assert torch.empty(2, device="cuda").device.type == "cpu"


def check_moves() -> None:
    import torch

    x = torch.ones(2)
    assert x.cuda() is x and x.cuda(0, non_blocking=True) is x and x.pin_memory() is x
    assert x.to("cuda").device.type == "cpu" and x.to(0).device.type == "cpu"
    assert x.to(device="cuda:1", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert x.to(torch.float64).dtype == torch.float64
    x.record_stream(torch.cuda.current_stream())
    layer = torch.nn.Linear(2, 2)
    assert layer.cuda(torch.cuda.current_device()) is layer and layer.to("cuda") is layer
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    assert empty.to_empty(device="cuda").weight.device.type == "cpu"


def check_types() -> None:
    import torch

    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.nn.Parameter(torch.ones(1).half()).type() == "torch.cuda.HalfTensor"
    assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.LongTensor").dtype == torch.int64
    assert torch.ones(1).type(torch.float16).dtype == torch.float16
    assert torch.cuda.FloatTensor([1.0]).dtype == torch.float32
    assert isinstance(torch.ones(1), torch.cuda.FloatTensor)


def check_device_queries() -> None:
    import torch

    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    torch.cuda.set_device(2)
    assert torch.cuda.current_device() == 2
    torch.cuda.set_device(torch.device("cuda:0"))
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_properties(torch.device("cuda:0")).major >= 9
    assert torch.cuda.get_device_capability()[0] >= 9
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocation.all.current"] == 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())


def check_streams_and_events() -> None:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    start.record()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(start)
    end.record(stream)
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0
    assert not torch.cuda.is_current_stream_capturing()
    outer, other = torch.cuda.current_stream(), torch.cuda.Stream()
    assert outer is torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        with torch.cuda.stream(other), torch.cuda.stream(None):
            assert torch.cuda.current_stream() is other
        assert torch.cuda.current_stream(0) is stream
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert seen == [outer]
    assert torch.cuda.current_stream() is outer
    torch.cuda.set_stream(other)
    assert torch.cuda.current_stream() is other
    torch.cuda.set_stream(outer)
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()


def check_random_state_is_the_cpu_one() -> None:
    import torch

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    torch.cuda.default_generators[0].set_state(state)
    assert torch.equal(first, torch.rand(3))
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))
    called = []
    torch.cuda._lazy_call(lambda: called.append(1))
    assert called == [1]


def check_adam_steps() -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight[0] < 1
    assert not torch.accelerator.is_available()
    torch.accelerator.synchronize()


def check_compile_is_off() -> None:
    import torch

    assert torch.compile(lambda x: x + 1)(torch.ones(1)) == 2


def check_data_loader_does_not_pin() -> None:
    import torch

    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
    assert not loader.pin_memory and len(list(loader)) == 2


def check_autocast_works() -> None:
    import torch

    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def check_second_install_changes_nothing() -> None:
    import torch

    before = torch.empty, torch.Tensor.to, torch.cuda.current_device
    cpu.install()
    assert (torch.empty, torch.Tensor.to, torch.cuda.current_device) == before


def check_nccl_is_refused() -> None:
    import torch

    try:
        torch.distributed.init_process_group("nccl", world_size=1, rank=0)
    except ValueError as error:
        assert "--distributed-backend gloo" in str(error)
    else:
        raise AssertionError("nccl was accepted")


def main() -> None:
    """Install the shim, run the checks, print what came of them."""
    cpu.install()
    results: dict[str, str | None] = {}
    for name, check in sorted(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                results[name] = None
            except Exception:
                results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
