"""Writes down what a worker computed, step by step and lane by lane, as digests: the evidence of `compare`.

A JSON object per line; `kind` is "start", "state" (after `step` updates), "lane", "nondeterministic", "end".
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from lockstep.chance import Generators
from lockstep.events import Closed, Event, LaneBegan, LaneEnded, LaneLeft, Started, StepBegins, StepCommitted
from lockstep.verify.digest import combined, digest_of
from lockstep.verify.evidence import trace_path

State = Callable[[], Mapping[str, Any]]


class Trace:
    """A subscriber that writes one JSON line per event to `worker-<rank>.jsonl` in its folder.

    `state` gives parameters, buffers and optimizer state by name, `buffers` the names that are buffers.
    """

    def __init__(self, folder: Path, rank: int, state: State, buffers: Callable[[], Iterable[str]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = trace_path(folder, rank).open("w", encoding="utf-8")
        self._rank = rank
        self._state = state
        self._buffers = buffers
        self._training = False
        self._lane: dict[str, Any] = {}
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._note_warning  # type: ignore[assignment]

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._write(kind="start", threads=event.threads, lanes=event.num_lanes, workers=event.num_workers)
            case StepBegins(step):
                self._write_state(step)
                self._training = True
            case StepCommitted():
                self._training = False
            case Closed(step):
                self._close(step)
            case LaneBegan() | LaneEnded() | LaneLeft() if self._training:
                self._note_lane(event)

    def _note_lane(self, event: LaneBegan | LaneEnded | LaneLeft) -> None:
        """A lane's gradients come in parts, one for each bucket; its record is written when it is left."""
        match event:
            case LaneBegan(step, lane, data):
                self._lane = {"step": step, "lane": lane, "data": digest_of(data), "gradients": {}}
            case LaneEnded(_, _, gradients):
                found = {name: [digest_of(value), _norm(value)] for name, value in gradients.items()}
                self._lane["gradients"].update(found)
            case LaneLeft():
                self._write(kind="lane", threads=torch.get_num_threads(), chance=_chance(), **self._lane)

    def _write_state(self, step: int) -> None:
        """The state after `step` updates, written just before the next step: all updates are applied then."""
        tensors = {name: digest_of(value) for name, value in self._state().items()}
        buffers = list(self._buffers())
        self._write(kind="state", step=step, digest=combined(tensors), tensors=tensors, buffers=buffers)

    def _close(self, step: int) -> None:
        self._write_state(step)
        self._write(kind="end", step=step)
        warnings.showwarning = self._show_warning
        self._file.close()

    def _note_warning(self, message: Warning | str, category: type[Warning], *where: Any) -> None:
        if "deterministic" in str(message):
            self._write(kind="nondeterministic", text=str(message).split("\n")[0])
        self._show_warning(message, category, *where)

    def _write(self, **entry: Any) -> None:
        print(json.dumps({"rank": self._rank, **entry}), file=self._file, flush=True)


def _norm(gradient: torch.Tensor) -> float:
    """How large it is: tells differences of rounding from others, which digests cannot."""
    return float(gradient.detach().abs().double().norm())


def _chance() -> dict[str, str]:
    """Where each generator stands. Only those in use: NumPy's is missing where nothing imported it."""
    now = Generators.now()
    found = {"torch": now.torch_cpu, "CUDA": now.torch_cuda, "Python": now.python, "NumPy": now.numpy}
    return {name: digest_of(state) for name, state in found.items() if state is not None}
