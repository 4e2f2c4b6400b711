"""Looks after the workers: finds those that are stopped or hung, tells of them, and ends them.

What is late or hung is decided in lateness.py. Here processes are seen, asked where they are, and killed: the rest is
a death like any other. Who is slow is decided in slowness.py, and only told.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.run.launching.crew import Crew
from lockstep.run.launching.frames import Frame
from lockstep.run.launching.lateness import Hung, Late, Look, Stopped, Watch
from lockstep.run.launching.process import members
from lockstep.run.launching.slowness import Slowness
from lockstep.run.launching.stacks import ASK, Question
from lockstep.run.launching.telling import tell_hung, tell_late, tell_pace, tell_stopped
from lockstep.run.launching.vitals import cpu_s, vitals

ANSWER_S = 1.0
_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Asked:
    """A step that was found late, and the missing workers that were asked where they are."""

    late: Late
    questions: dict[int, Question]
    until_s: float


@dataclass
class Lookout:
    """Watches over a crew, look by look."""

    crew: Crew
    run_dir: Path
    say: Callable[[str], None]
    slowness: Slowness = field(default_factory=Slowness)
    _watch: Watch = field(default_factory=Watch)
    _asked: Asked | None = None
    condemned: dict[int, str] = field(default_factory=dict)
    """What was wrong with the processes that were killed here."""

    def look(self, now_s: float) -> list[int]:
        """Tells what is wrong; gives the slots of the workers that were ended for it."""
        looks = self._looks()
        condemned = []
        for finding in self._watch.look(now_s, looks, self._cpu_s):
            match finding:
                case Late():
                    self._ask(finding, now_s)
                case Stopped(slot):
                    self._condemn(slot, "it was stopped", tell_stopped(finding, looks[slot]))
                    condemned.append(slot)
                case Hung(slot) if self._asked is None:  # else the late step is told first
                    self._condemn(slot, "it did nothing", tell_hung(slot))
                    condemned.append(slot)
        self._tell_late(looks, now_s)
        for news in self.slowness.look(now_s, {slot: look.row for slot, look in looks.items()}):
            self.say(tell_pace(news))
        return condemned

    def _looks(self) -> dict[int, Look]:
        seen = {slot: vitals(worker.pid) for slot, worker in self.crew.running.items()}
        return {
            slot: Look(self.crew.running[slot].pid, self.crew.row(slot), found.state)
            for slot, found in seen.items()
            if found is not None and found.state not in _ENDED and self.crew.running[slot].pid not in self.condemned
        }

    def _cpu_s(self, slot: int) -> float:
        return cpu_s(members({self.crew.running[slot].group}))

    def _condemn(self, slot: int, why: str, told: str) -> None:
        worker = self.crew.running[slot]
        self.say(told)
        self.condemned[worker.pid] = why
        worker.send(signal.SIGKILL)

    def _ask(self, late: Late, now_s: float) -> None:
        questions = {slot: Question.to(self.run_dir, slot) for slot in late.missing}
        self._asked = Asked(late, questions, now_s + ANSWER_S)
        for slot in late.missing:
            self.crew.running[slot].send(ASK)

    def _tell_late(self, looks: dict[int, Look], now_s: float) -> None:
        """Tells of the step once all have answered, or have had their time; not of one who has gone meanwhile."""
        if self._asked is None:
            return
        late, questions = self._asked.late, self._asked.questions
        answers = {slot: question.answer() for slot, question in questions.items()}
        places: dict[int, Frame] = {slot: frame for slot, frame in answers.items() if frame is not None}
        if len(places) < len(questions) and now_s < self._asked.until_s:
            return
        self._asked = None
        if all(slot in looks for slot in late.missing):
            self.say(tell_late(late, looks, places, now_s))
