"""The generators outside of lanes, as part of a state that is saved or sent."""

from typing import Any

from lockstep.chance import Generators
from lockstep.run.state import Json, Tensors, pack, unpack


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
    """Afterwards they stand there. A kind that was not in use then stays where it is."""
    saved: dict[str, Any] = unpack(packed, tensors)
    now = Generators.now()
    numpy = now.numpy if saved["numpy"] is None else tuple(saved["numpy"])
    cuda = now.torch_cuda if saved["cuda"] is None else saved["cuda"]
    Generators(saved["torch"], cuda, saved["python"], numpy).restore()
