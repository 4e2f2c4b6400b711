"""Optimizers as the script made them: their classes, and the settings that a resume puts back.

# Note [Settings without effect]
# A resume loads an optimizer's state, and with it the rate and every other setting as they were saved. A script that
# was given another rate in between trains on with the old one. So a snapshot has the settings as `run.replicate` found
# them, which no schedule has changed yet, and a note names those that the script makes otherwise now. Another class of
# optimizer would load what fits, or fail somewhere in it: it is refused. Both are those of the script that began the
# run, through any number of resumes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

_NOT_SETTINGS = ("params", "param_names", "initial_lr")
"""Keys of a group that a script does not set, or that repeat its rate."""

Settings = dict[str, Any]
Made = dict[str, Any]
"""`class`, and `groups`: the plain settings of each group."""


def made(optimizer: Optimizer) -> Made:
    """An optimizer as it is now."""
    return {"class": type(optimizer).__name__, "groups": [_settings(group) for group in optimizer.param_groups]}


def other_class(label: str, now: Made, saved: Made) -> str:
    """What is said of an optimizer of another class than the one that was saved; empty if it is of the same."""
    if now["class"] == saved["class"]:
        return ""
    return (
        f"has {saved['class']} as {label}, and the script makes {now['class']}, which cannot go on from its state. "
        f"Make {saved['class']} again, or begin another run, in another folder, from the weights alone"
    )


def without_effect(label: str, now: Made, saved: Made, groups: list[Mapping[str, Any]]) -> str:
    """Names what the script makes otherwise now than in the run that was saved, whose `groups` are put back; empty if
    there is nothing. See Note [Settings without effect]."""
    found = list(_different(*(list(map(_settings, of)) for of in (now["groups"], saved["groups"], groups))))
    if not found:
        return ""
    more = f", and {len(found) - 4} more" if len(found) > 4 else ""
    return (
        f"the settings of {label} are the checkpoint's, not the script's: {', '.join(found[:4])}{more}. To go on with "
        "others, set them in optimizer.param_groups after the resume"
    )


def _different(now: list[Settings], saved: list[Settings], held: list[Settings]) -> Iterator[str]:
    numbered = len(held) > 1
    for number, (mine, theirs, loaded) in enumerate(zip(now, saved, held, strict=False)):
        for name in (name for name in mine if name in theirs and name in loaded):
            if mine[name] not in (theirs[name], loaded[name]):
                where = f" in group {number}" if numbered else ""
                yield f"{name}{where} is {loaded[name]!r}, and the script says {mine[name]!r}"


def _settings(group: Mapping[str, Any]) -> Settings:
    named = ((name, group[name]) for name in sorted(group) if name not in _NOT_SETTINGS)
    return {name: _as_plain(value) for name, value in named if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _as_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(map(_as_plain, value)) if isinstance(value, list | tuple) else value
