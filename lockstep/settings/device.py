"""Which device a worker computes on: the one that was asked for, or its own GPU where there are any.

# Note [Neighbours share a GPU]
# Where a host has more workers than GPUs, they share them evenly, and neighbours sit on the same one. Workers that come
# later are counted as if they had founded the run: one that takes a lost worker's slot takes its GPU too, and one in
# a slot beyond wraps around. So the rule needs the slot and the number of founders, and nothing of who lives now.
"""

import torch

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.settings.environment import parse_device

CPU = torch.device("cpu")


def choose(asked: str | None, local_rank: int, local_size: int, num_gpus: int) -> torch.device:
    """The device of worker `local_rank` among `local_size` on a host with `num_gpus`.

    See Note [Neighbours share a GPU]. Raises for a name that is none, and for a GPU that is not there.
    """
    wanted = _checked(asked) if asked is not None else ("cuda" if num_gpus else "cpu")
    if wanted == "cpu":
        return CPU
    if num_gpus < 1:
        raise BadEnvironment(f"device={wanted!r} was asked for, but {why_no_gpu()}")
    if wanted == "cuda":
        return torch.device("cuda", _own_gpu(local_rank, local_size, num_gpus))
    number = int(wanted.removeprefix("cuda:"))
    if number >= num_gpus:
        found = "1 GPU, cuda:0" if num_gpus == 1 else f"{num_gpus} GPUs, cuda:0 to cuda:{num_gpus - 1}"
        raise BadEnvironment(
            f'device={wanted!r} was asked for, but torch finds {found}: name one of them, or say "cuda"'
        )
    return torch.device("cuda", number)


def sharing(asked: str | None, local_size: int, num_gpus: int) -> dict[torch.device, int]:
    """The devices of all workers of a host, and how many workers are on each."""
    devices = [choose(asked, local_rank, local_size, num_gpus) for local_rank in range(local_size)]
    return {device: devices.count(device) for device in dict.fromkeys(devices)}


def count_gpus() -> int:
    """How many GPUs torch may use. Does not initialise CUDA where the driver's library can be asked (NVML)."""
    return torch.cuda.device_count()


def why_no_gpu() -> str:
    """Why torch finds no GPU, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA: install one that has it, or say "
            'device="cpu" (--device cpu)'
        )
    return (
        "torch sees no GPU: look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES, which may hide them, or say "
        'device="cpu" (--device cpu)'
    )


def in_words(shared: dict[torch.device, int], name: str) -> str:
    """`cuda:0 (NVIDIA H200), 4 workers share it`; nothing for the CPU."""
    devices = list(shared)
    if devices[0].type == "cpu":
        return ""
    if len(devices) == 1:
        most = shared[devices[0]]
        return f"{devices[0]} ({name})" + (f", {most} workers share it" if most > 1 else "")
    most = max(shared.values())
    return f"{devices[0]} to {devices[-1]} ({name})" + (f", up to {most} workers share one" if most > 1 else "")


def _own_gpu(local_rank: int, local_size: int, num_gpus: int) -> int:
    if local_size <= num_gpus:
        return local_rank % num_gpus
    return local_rank % local_size * num_gpus // local_size


def _checked(asked: str) -> str:
    try:
        return parse_device(asked)
    except ValueError as error:
        raise BadArgument(f"device {error}") from None
