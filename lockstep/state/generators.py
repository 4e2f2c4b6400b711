"""The generators outside of lanes, as part of a state that is saved or sent."""

from typing import Any

import torch

from lockstep.chance import Generators
from lockstep.state.packed import Json, Tensors, pack, unpack


def pack_generators(tensors: Tensors) -> Json:
    """Where they stand now; tensors go into `tensors`."""
    now = Generators.now()
    numpy = None
    if now.numpy is not None:
        name, keys, *rest = now.numpy
        numpy = [name, [int(key) for key in keys], *rest]
    states = {"torch": now.torch_cpu, "cuda": now.torch_cuda, "python": now.python, "numpy": numpy}
    return pack(states, "generators", tensors)


def unpack_generators(packed: Json, tensors: Tensors) -> None:
    """Afterwards they stand there. Those that are not in use here, or were not in use there, go on as they are."""
    saved: dict[str, Any] = unpack(packed, tensors)
    numpy = None if saved["numpy"] is None else tuple(saved["numpy"])
    cuda = saved["cuda"] if torch.cuda.is_initialized() else None
    Generators(saved["torch"], cuda, saved["python"], numpy).restore()
