"""State that is restored bit for bit, or refused by name.

# Note [Given and held]
# An object does not always hold what `load_state_dict` was given. torch's optimizers cast tensors to the dtype of their
# parameter, so that float32 moments of bfloat16 parameters lose bits; other objects may round or drop some of it. So
# the states of all objects are read again after all have been loaded. Tensors that an optimizer has cast are restored
# as they were saved. What differs even then is refused. What is held and was not saved does not matter: a later version
# of torch may have further settings.
"""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import BadCheckpoint
from lockstep.state.models import Stateful
from lockstep.state.snapshot import Json, Tensors, bytes_of, pack, unpack


def load_exactly(
    things: Mapping[str, Stateful], packed: Mapping[str, Json], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Loads into every thing the state that was packed under its name; BadCheckpoint names what it does not hold.

    See Note [Given and held]. Afterwards no thing shares memory with `tensors`.
    """
    for name, thing in things.items():
        _load(name, thing, unpack(packed[name], _copies(name, thing, packed[name], tensors)))
        if isinstance(thing, Optimizer):
            _uncast(thing, unpack(packed[name], tensors))
    for name, thing in things.items():
        differs = _difference(_held(name, thing), unpack(packed[name], tensors), name)
        if differs:
            raise BadCheckpoint(
                f"{name} ({type(thing).__name__}) is not as it was saved after its load_state_dict: {differs}. The run "
                "would go on as another one. Its load_state_dict must take back all that its state_dict gives."
            )


def _load(name: str, thing: Stateful, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except Exception as error:  # it is the user's code, and may raise anything
        raise BadCheckpoint(
            f"{name} ({type(thing).__name__}) does not take the state that was saved: {type(error).__name__}: {error}"
        ) from error


def _copies(name: str, thing: Stateful, packed: Json, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors that `packed` names, each on the device on which the thing has its own of that name now."""
    here: Tensors = {}
    pack(thing.state_dict(), name, here)
    devices = {key: here[key].device if key in here else "cpu" for key in _named(packed)}
    return {key: tensors[key].to(device, copy=True) for key, device in devices.items()}


def _named(packed: Json) -> Iterator[str]:
    """The names of the tensors in a packed value."""
    if isinstance(packed, dict) and "tensor" in packed:
        yield packed["tensor"]
    elif isinstance(packed, dict | list):
        for inner in packed.values() if isinstance(packed, dict) else packed:
            yield from _named(inner)


def _uncast(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restores the saved dtype of tensors that torch has cast to that of their parameter, on torch's device."""
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved_group["params"], strict=False):
            if parameter in optimizer.state and number in saved["state"]:
                optimizer.state[parameter] = _uncasted(optimizer.state[parameter], saved["state"][number])


def _uncasted(held: Any, saved: Any) -> Any:
    if isinstance(held, torch.Tensor) and isinstance(saved, torch.Tensor):
        return held if held.dtype == saved.dtype else saved.to(held.device, copy=True)
    if isinstance(held, dict) and isinstance(saved, dict):
        for key in held.keys() & saved.keys():
            held[key] = _uncasted(held[key], saved[key])
    if isinstance(held, list | tuple) and isinstance(saved, list | tuple) and len(held) == len(saved):
        return type(held)(map(_uncasted, held, saved))
    return held


def _held(name: str, thing: Stateful) -> Any:
    """The thing's state in the form of an unpacked snapshot."""
    tensors: Tensors = {}
    return unpack(pack(thing.state_dict(), name, tensors), tensors)


def _difference(held: Any, saved: Any, path: str) -> str:
    """The first place at which something that was saved is not held, and how; empty if there is none."""
    if isinstance(saved, torch.Tensor) or isinstance(held, torch.Tensor):
        return "" if _are_equal(held, saved) else f"{path} is {_form(held)} and was {_form(saved)}"
    if isinstance(saved, dict) and isinstance(held, dict):
        lost = [key for key in saved if key not in held]
        inner = (_difference(held[key], item, f"{path}/{key}") for key, item in saved.items() if key in held)
        return f"{path}/{lost[0]} is gone" if lost else next(filter(None, inner), "")
    if isinstance(saved, list | tuple) and type(held) is type(saved) and len(held) == len(saved):
        pairs = enumerate(zip(held, saved, strict=True))
        return next(filter(None, (_difference(mine, item, f"{path}/{number}") for number, (mine, item) in pairs)), "")
    return "" if repr(held) == repr(saved) else f"{path} is {_form(held)} and was {_form(saved)}"


def _are_equal(held: Any, saved: Any) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if not isinstance(held, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return False
    alike = held.dtype == saved.dtype and held.shape == saved.shape
    return alike and torch.equal(bytes_of(held), bytes_of(saved.to(held.device)))


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    first = reprlib.repr(value.flatten()[:3].tolist())
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} beginning with {first}"
