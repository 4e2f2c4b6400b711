"""Measures copies inside of GPUs and between them, and an all-reduce by NCCL: prints one JSON object.

python -m lockstep.programs.doctor.gpu_trial
"""

import json
from collections.abc import Callable

import torch
from torch.cuda import nccl

from lockstep.errors import BadEnvironment

NUM_BYTES = 256 * 1024**2
WARM_UP, REPEATS = 2, 5


def seconds(work: Callable[[], object], devices: list[int]) -> float:
    """How long one of several repetitions takes; all devices are waited for."""
    events = {
        device: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for device in devices
    }
    for _ in range(WARM_UP):
        work()
    for device, (begin, _) in events.items():
        torch.cuda.synchronize(device)
        begin.record(torch.cuda.current_stream(device))
    for _ in range(REPEATS):
        work()
    for device, (_, end) in events.items():
        end.record(torch.cuda.current_stream(device))
    for device in devices:
        torch.cuda.synchronize(device)
    longest_ms: float = max(begin.elapsed_time(end) for begin, end in events.values())
    return longest_ms / 1000 / REPEATS


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(NUM_BYTES // 4, device=f"cuda:{number}") for number in range(count)]


def own_rate(values: torch.Tensor) -> float:
    """A copy on one GPU reads and writes every byte."""
    place = torch.empty_like(values)
    assert values.device.index is not None
    return 2 * NUM_BYTES / seconds(lambda: place.copy_(values), [values.device.index])


def link_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    devices = [int(source.device.index), int(target.device.index)]
    with torch.cuda.device(source.device):
        return NUM_BYTES / seconds(lambda: target.copy_(source, non_blocking=True), devices)


def nccl_rate(values: list[torch.Tensor]) -> float | None:
    """The bus bandwidth of an all-reduce: what each GPU sends if it is a ring."""
    if len(values) < 2 or not nccl.is_available(values):
        return None
    sent = 2 * (len(values) - 1) / len(values) * NUM_BYTES
    return sent / seconds(lambda: nccl.all_reduce(values), list(range(len(values))))


def main() -> None:
    if not torch.cuda.is_available():
        raise BadEnvironment("torch finds no GPU here")
    count = torch.cuda.device_count()
    values = tensors(count)
    pairs = [
        [a, b, torch.cuda.can_device_access_peer(a, b), link_rate(values[a], values[b])]
        for a in range(count)
        for b in range(count)
        if a != b
    ]
    print(json.dumps({"own": [own_rate(value) for value in values], "pairs": pairs, "nccl": nccl_rate(values)}))


if __name__ == "__main__":
    main()
