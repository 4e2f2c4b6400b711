"""Writes what a worker computed, step by step and lane by lane, as digests (see evidence.py); and its final state.

A JSON object per line; `kind` is "start", "state" (after `step` updates), "lane", "step" (the gradient of all lanes),
"nondeterministic", "compiled" (a graph), "kept" (what a lane, or a data set, keeps for the next), "end".
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from lockstep.chance import Generators
from lockstep.events import (
    KEPT_BY_DATA,
    KEPT_BY_LANE,
    Closed,
    Copied,
    Event,
    GenerationFormed,
    GraphCompiled,
    LaneBegan,
    LaneEnded,
    LaneGradients,
    Note,
    Started,
    StepBegan,
    StepCommitted,
)
from lockstep.state.tensor_file import write_tensors
from lockstep.verify.digest import combined, digest_of
from lockstep.verify.evidence import trace_path


@dataclass(frozen=True)
class Sources:
    """What a trace reads from its run: parameters, buffers and optimizer state by name, which of them are buffers,
    the gradients in `p.grad`, the learning rates, and whether the run has failed on this worker.
    """

    state: Callable[[], Mapping[str, Any]]
    buffers: Callable[[], Iterable[str]]
    gradients: Callable[[], Mapping[str, torch.Tensor]] = dict
    rates: Callable[[], Mapping[str, float]] = dict
    has_failed: Callable[[], bool] = lambda: False


READ = (
    Started,
    StepBegan,
    StepCommitted,
    GenerationFormed,
    GraphCompiled,
    Copied,
    Closed,
    LaneBegan,
    LaneGradients,
    LaneEnded,
    Note,
)
"""The events that a trace reads."""


class Trace:
    """A subscriber that writes one JSON line per event to `worker-<rank>.jsonl` in its folder.

    A replacement of a worker, which has its rank, has a file of its own: `worker-<rank>-<pid>.jsonl`.
    """

    def __init__(self, folder: Path, rank: int, sources: Sources, *, is_replacement: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank, self._sources = folder, rank, sources
        self._file: TextIO = self._open(is_replacement)
        self._generation = 0
        self._batch: int | None = None
        self._training = False
        self._lane: dict[str, Any] = {}
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._note_warning  # type: ignore[assignment]

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._write(kind="start", threads=event.threads, lanes=event.num_lanes, workers=event.num_workers)
            case StepBegan(batch):
                self._batch = batch
                self._write_state(event.step)
                self._training = True
            case StepCommitted():
                self._training = False
                norms = {name: _norm(gradient) for name, gradient in self._sources.gradients().items()}
                self._write(kind="step", step=event.step, norms=norms)
            case GenerationFormed():
                self._generation = event.generation
            case GraphCompiled(text):
                self._write(kind="compiled", text=text)
            case Note(text) if text.startswith((KEPT_BY_LANE, KEPT_BY_DATA)):
                self._write(kind="kept", text=text)
            case Copied(slot):
                self._file.close()
                self._rank = slot
                self._file = self._open(is_replacement=True)
            case Closed():
                self._close(event.step)
            case LaneBegan() | LaneGradients() | LaneEnded() if self._training:
                self._note_lane(event)

    def _note_lane(self, event: LaneBegan | LaneGradients | LaneEnded) -> None:
        """A lane's gradients come in parts, one for each bucket; its record is written when the lane ends."""
        match event:
            case LaneBegan(lane, data=data):
                self._lane = {"step": event.step, "lane": lane, "data": digest_of(data), "gradients": {}}
            case LaneGradients(_, gradients):
                records = {name: [digest_of(value), _norm(value)] for name, value in gradients.items()}
                self._lane["gradients"].update(records)
            case LaneEnded():
                made = {"threads": torch.get_num_threads(), "generation": self._generation}
                self._write(kind="lane", chance=_chance(), **made, **self._lane)

    def _write_state(self, step: int) -> None:
        """The state after `step` updates, written just before the next step: all updates are applied then."""
        tensors = {name: digest_of(value) for name, value in self._sources.state().items()}
        place = {"batch": self._batch, "rates": dict(self._sources.rates())}
        buffers = list(self._sources.buffers())
        self._write(kind="state", step=step, digest=combined(tensors), tensors=tensors, buffers=buffers, **place)

    def _close(self, step: int) -> None:
        self._batch = None
        self._write_state(step)
        self._write(kind="end", step=step, failed=self._sources.has_failed())
        warnings.showwarning = self._show_warning
        self._file.close()

    def _note_warning(self, message: Warning | str, category: type[Warning], *where: Any) -> None:
        if "deterministic" in str(message):
            self._write(kind="nondeterministic", text=str(message).split("\n")[0])
        self._show_warning(message, category, *where)

    def _open(self, is_replacement: bool) -> TextIO:
        return trace_path(self._folder, self._rank, os.getpid() if is_replacement else None).open("w", encoding="utf-8")

    def _write(self, **entry: Any) -> None:
        print(json.dumps({"rank": self._rank, **entry}), file=self._file, flush=True)


class Dump:
    """A subscriber that writes every tensor of `state()` to one safetensors file when the run ends."""

    def __init__(self, path: Path, state: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._state = path, state

    def __call__(self, event: Event) -> None:
        if isinstance(event, Closed):
            write_tensors(self._path, {name: v for name, v in self._state().items() if torch.is_tensor(v)})


def _norm(gradient: torch.Tensor) -> float:
    """The norm distinguishes differences of rounding from others, which digests cannot."""
    return float(gradient.detach().abs().double().norm())


def _chance() -> dict[str, str]:
    """The digest of each generator's state. Only those in use: NumPy's is missing where nothing imported it.

    Python's is a tuple of many numbers: as one text it is digested in a hundredth of the time.
    """
    now = Generators.now()
    states = {"torch": now.torch_cpu, "CUDA": now.torch_cuda, "Python": repr(now.python), "NumPy": now.numpy}
    return {name: digest_of(state) for name, state in states.items() if state is not None}
