"""What a run has come to behind a checkpoint, by which a run that goes on from there shows that it does the same.

# Note [Trail]
# A resumed run should do what the run before would have done. What the script keeps in variables of its own begins
# anew there, files may have changed, another machine may add in another order; no look at the script shows all of that.
# But where the run before has gone on behind the checkpoint, what it came to is known. So it leaves a trail beside the
# checkpoint: a fingerprint of the gradient of the first step, of what its update has made, and of the state 1, 2, 4, 8
# and so on steps later. The resumed run comes to the same places. Where it has something else, it does something else,
# whatever the cause; the gradient is compared before it is applied. A run that is ended by a signal leaves a trail too:
# once it is saved it computes one more step, if steps are short, and ends behind the update. So nothing is logged twice
# that the script logs after it.
#
# The trail also names what the run was: script, arguments, versions, hardware. If all of these are the same, something
# of the script begins anew, or its data are others, and the run is refused. If not, the difference may be meant, and a
# note names it. Operators that are not deterministic show nothing: where there was one, nothing is compared.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import Misuse
from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.state.models import Models

FILE = "trail.jsonl"
GRADIENT, UPDATE, STATE = "gradient", "update", "state"
MOST_BYTES = 1 << 20
"""A longer file is no trail."""

Circumstances = Mapping[str, str]
"""What a run was, by name: script, arguments, versions, hardware."""


@dataclass(frozen=True)
class Footprint:
    """The fingerprint of a step's gradient, of the state behind its first update, or of that in which it begins."""

    kind: str
    step: int
    fingerprint: str


@dataclass(frozen=True)
class Trail:
    """What a run has come to behind a checkpoint."""

    circumstances: Circumstances
    footprints: tuple[Footprint, ...]

    @classmethod
    def read(cls, checkpoint: Path) -> "Trail | None":
        """That of a checkpoint; None if there is none. Lines that cannot be read are left out: a run may have been
        killed as it wrote the last one."""
        path = checkpoint / FILE
        try:
            if path.is_symlink() or path.stat().st_size > MOST_BYTES:
                return None
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return None
        circumstances: dict[str, str] = {}
        found: list[Footprint] = []
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                entry = json.loads(line)
                if "circumstances" in entry:
                    circumstances = {str(name): str(value) for name, value in dict(entry["circumstances"]).items()}
                else:
                    found.append(Footprint(str(entry["kind"]), int(entry["step"]), str(entry["fingerprint"])))
        return cls(circumstances, tuple(found)) if circumstances and found else None

    def expected(self, kind: str, step: int) -> str | None:
        return next((one.fingerprint for one in self.footprints if (one.kind, one.step) == (kind, step)), None)


class TrailWriter:
    """Leaves the trail of one checkpoint. Nothing that goes wrong with the file ends the training."""

    def __init__(self, step: int, circumstances: Circumstances, place: Callable[[], Path | None]) -> None:
        """`place` gives the checkpoint once it is on the disk."""
        self._step, self._place = step, place
        self._lines = [json.dumps({"circumstances": dict(circumstances)})]
        self._is_new = True

    def wants(self, kind: str, step: int) -> bool:
        """Whether the footprint of that kind and step belongs to the trail."""
        behind = step - self._step
        return behind > 0 and behind & (behind - 1) == 0 if kind == STATE else behind == 0

    def add(self, footprint: Footprint) -> None:
        self._lines.append(json.dumps(vars(footprint)))
        self.flush()

    def flush(self) -> None:
        """Writes what there is, if the checkpoint is there."""
        path = self._place()
        if path is None or len(self._lines) < 1 + self._is_new:
            return
        with suppress(OSError), open(path / FILE, "w" if self._is_new else "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in self._lines))
        self._lines, self._is_new = [], False


class TrailFollower:
    """One worker's part: compares what the run comes to with the trail of the checkpoint from which it goes on, and
    leaves a trail behind the newest one that it has saved. `circumstances` are asked for where they are needed."""

    def __init__(
        self,
        models: Models,
        circumstances: Callable[[], Circumstances],
        note: Callable[[str], None],
        is_reproducible: bool = True,
    ) -> None:
        self._models, self._circumstances, self._note = models, circumstances, note
        self._known: Trail | None = None
        self._writer: TrailWriter | None = None
        self._is_reproducible = is_reproducible
        self._updated_in = -1
        """The step that was updated from last."""

    def go_on(self, trail: Trail | None) -> None:
        """The run goes on from the checkpoint that has this trail."""
        self._known = trail if self._is_reproducible else None

    def saved(self, step: int, place: Callable[[], Path | None]) -> None:
        """A checkpoint of `step` is being written; `place` gives it once it is on the disk."""
        self._writer = TrailWriter(step, self._circumstances(), place) if self._is_reproducible else None

    def give_up(self) -> None:
        """The run is not reproducible: an operator has no deterministic kernel."""
        self._is_reproducible, self._known, self._writer = False, None, None

    def step_begins(self, step: int) -> None:
        """Raises Misuse if the state is another one than the run before had here."""
        self._pass(STATE, step, self._models.everything)

    def step_ends(self, step: int) -> None:
        """The gradient of `step` stands in `p.grad`. Raises Misuse if it is another one than the run before had."""
        self._pass(GRADIENT, step, self._models.gradients)

    def update_ends(self, step: int) -> None:
        """An update with the gradient of `step` is made. Raises Misuse if its first one has made something else than in
        the run before."""
        if step != self._updated_in:
            self._updated_in = step
            self._pass(UPDATE, step, self._models.everything)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _pass(self, kind: str, step: int, state: Callable[[], Mapping[str, Any]]) -> None:
        expected = None if self._known is None else self._known.expected(kind, step)
        wants = self._writer is not None and self._writer.wants(kind, step)
        if self._writer is not None:
            self._writer.flush()
        if expected is None and not wants:
            return
        here = Footprint(kind, step, combined(fingerprints(state())).hex())
        if expected is not None and here.fingerprint != expected:
            self._differ(here)
        if wants:
            assert self._writer is not None
            self._writer.add(here)

    def _differ(self, here: Footprint) -> None:
        assert self._known is not None
        before, now = self._known.circumstances, self._circumstances()
        self._known = None
        others = [name for name in before if name in now and before[name] != now[name]]
        what = {
            GRADIENT: "the gradient of step {}",
            UPDATE: "what the update of step {} has made",
            STATE: "the state before step {}",
        }[here.kind].format(here.step)
        if others:
            self._note(
                f"{what} is not what it was in the run from whose checkpoint this one goes on; "
                f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not as in that run"
            )
            return
        raise Misuse(
            f"{what} is not what it was in the run from whose checkpoint this one goes on, with the same script, "
            "versions and hardware. Something that the training depends on begins anew in a resumed script (a variable "
            "or an attribute that training changes), or was changed (the data, a file of settings). Compute it from "
            "run.step, or keep it in an object with a state_dict and give that to run.replicate(..., name=object). If "
            "it was changed on purpose, LOCKSTEP_TRAIL=0 goes on all the same."
        )
