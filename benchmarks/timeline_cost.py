"""What a timeline costs while it is on, and the history that every run writes.

    lockstep run -n 2 benchmarks/timeline_cost.py mlp
    lockstep run -n 2 benchmarks/timeline_cost.py gpt 60

Steps with and without it take turns in the same processes; the ratio of each pair is with ÷ without. Without it, nobody
reads the events.
"""

import statistics
import tempfile
from pathlib import Path

from paired_steps import Switch, paired, words

import lockstep
from lockstep.events import Event
from lockstep.observe.history import READ, StepHistory
from lockstep.observe.timeline.part import PartWriter
from lockstep.programs.bench.spread import quantile
from lockstep.programs.models import reference_workload
from lockstep.run.run import Run


def switches(run: Run, folder: Path, what: str) -> tuple[Switch, Switch]:
    """Two functions: the next steps are recorded, or are not."""
    events = run._events
    writer = PartWriter(events, folder, "cpu", lambda: 1, events.note)
    history = StepHistory(folder, lambda: run.is_first, dict, events.note)

    def on() -> None:
        if what == "timeline":
            writer.begin()
        else:
            events.subscribe(history, *READ)
        _find_readers(run)

    def off() -> None:
        writer.close()
        events.unsubscribe(history)
        _find_readers(run)

    return on, off


def _find_readers(run: Run) -> None:
    """Who reads what is looked up once after a change: not in the time of the step."""
    for kind in Event.__subclasses__():
        run._events.has_readers(kind)


def main(model: str, pairs: int) -> None:
    for what in ("timeline", "history"):
        with lockstep.start(seed=0, drift_every=0, recover=False) as run:
            with tempfile.TemporaryDirectory() as folder:
                ratios, without = paired(run, reference_workload(model), pairs, *switches(run, Path(folder), what))
            low, middle, high = (quantile(ratios, part) for part in (0.25, 0.5, 0.75))
            run.print(
                f"{model}, {what}: {statistics.median(without) * 1000:.1f} ms a step; with ÷ without {middle:.4f} "
                f"({low:.3f} to {high:.3f}, {pairs} pairs)"
            )


if __name__ == "__main__":
    main(*words())
