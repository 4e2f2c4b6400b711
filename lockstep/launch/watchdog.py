"""Looks after the workers: finds those that are stopped, late or hung, tells of them, and ends what will not go on.

What is late or hung is decided in hangs.py. Here processes are seen, asked where they are, and killed: the rest is
a death like any other. Who is slow is decided in stragglers.py, and only told.
"""

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.launch.crew import Crew
from lockstep.launch.hangs import Hung, Idle, Late, Look, Stopped, Watch
from lockstep.launch.messages import tell_hung, tell_late, tell_pace, tell_stopped
from lockstep.launch.process import members
from lockstep.launch.process_stats import Activity, activity, handles, vitals
from lockstep.launch.stacks import ASK, Question
from lockstep.launch.stragglers import Slowness
from lockstep.launch.traceback_lines import Frame

ANSWER_S = 1.0
_ENDED = ("Z", "X")


@dataclass(frozen=True)
class Asked:
    """Something that was found late, and the guilty, who were asked where they are."""

    finding: Late | Idle
    questions: dict[int, Question]
    until_s: float


@dataclass
class Lookout:
    """Watches over a crew, look by look."""

    crew: Crew
    run_dir: Path
    say: Callable[[str], None]
    slowness: Slowness = field(default_factory=Slowness)
    watch: Watch = field(default_factory=Watch)
    _asked: Asked | None = None
    condemned: dict[int, str] = field(default_factory=dict)
    """What was wrong with the processes that were killed here."""

    def look(self, now_s: float, joiners: Collection[int] = ()) -> list[int]:
        """Tells what is wrong; gives the slots of the workers that were ended for it.

        `joiners` were started after the founders.
        """
        looks = self._looks(joiners)
        condemned: list[int] = []
        for finding in self.watch.look(now_s, looks, self._activity):
            match finding:
                case Late() | Idle():
                    self._ask(finding, now_s)
                case Stopped(slot):
                    self._condemn([slot], "it was stopped", tell_stopped(finding, looks[slot]))
                    condemned.append(slot)
                case Hung(slots) if self._asked is None:  # else what is late is told first
                    self._condemn(slots, "it did nothing", tell_hung(finding))
                    condemned += slots
        self._tell_asked(looks, now_s)
        for news in self.slowness.look(now_s, {slot: look.row for slot, look in looks.items()}):
            self.say(tell_pace(news))
        return condemned

    def _looks(self, joiners: Collection[int]) -> dict[int, Look]:
        seen = {slot: vitals(worker.pid) for slot, worker in self.crew.running.items()}
        return {
            slot: Look(self.crew.running[slot].pid, self.crew.row(slot), found.state, slot in joiners)
            for slot, found in seen.items()
            if found is not None and found.state not in _ENDED and self.crew.running[slot].pid not in self.condemned
        }

    def _activity(self, slot: int) -> Activity:
        return activity(members({self.crew.running[slot].group}))

    def _condemn(self, slots: Collection[int], why: str, told: str) -> None:
        self.say(told)
        for worker in [self.crew.running[slot] for slot in slots]:
            self.condemned[worker.pid] = why
            worker.send(signal.SIGKILL)

    def _ask(self, finding: Late | Idle, now_s: float) -> None:
        """Asks those who can answer: a process that has just begun would die of the question."""
        able = [slot for slot in finding.guilty if handles(self.crew.running[slot].pid, ASK)]
        questions = {slot: Question.to(self.run_dir, slot) for slot in able}
        self._asked = Asked(finding, questions, now_s + ANSWER_S)
        for slot in able:
            self.crew.running[slot].send(ASK)

    def _tell_asked(self, looks: dict[int, Look], now_s: float) -> None:
        """Tells what was found once all have answered, or have had their time; not of one who has gone meanwhile."""
        if self._asked is None:
            return
        finding, questions = self._asked.finding, self._asked.questions
        answers = {slot: question.answer() for slot, question in questions.items()}
        places: dict[int, Frame] = {slot: frame for slot, frame in answers.items() if frame is not None}
        if len(places) < len(questions) and now_s < self._asked.until_s:
            return
        self._asked = None
        if all(slot in looks for slot in finding.named):
            self.say(tell_late(finding, looks, places, now_s))
