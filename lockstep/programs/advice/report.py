"""The answer of `lockstep advise`: the advice, how fresh it is, and what to do with the workers that were named."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.observe.noise_lines import advice_on
from lockstep.optim.noise.advice import Advice
from lockstep.programs.advice.crew import Crew, crew_of
from lockstep.programs.advice.record import find


@dataclass(frozen=True)
class Report:
    """Advice from what was measured up to `step`; `crew` is None unless a number of workers was asked about."""

    step: int
    advice: Advice
    crew: Crew | None

    def text(self) -> str:
        lines = [f"Measured up to step {self.step:,}.", self.advice.text()]
        return "\n".join(lines + ([] if self.crew is None else [self.crew.text()]))

    def to_json(self) -> str:
        crew = None if self.crew is None else asdict(self.crew)
        return json.dumps({"step": self.step, **asdict(self.advice), "crew": crew})


def report_on(folder: Path, workers: int | None = None) -> Report:
    """What the run in `folder` can be advised now; raises TooLittle if it has not measured enough."""
    known = find(folder)
    advice = advice_on(known.newest, known.batch or 1.0)  # a batch of 0 was never measured: refused as too little
    return Report(known.newest.step, advice, None if workers is None else crew_of(workers, advice))
