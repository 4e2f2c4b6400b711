"""What it costs, without any fault, that a lost worker costs nothing.

    lockstep run -n 2 benchmarks/fault_cost.py mlp
    lockstep run -n 2 benchmarks/fault_cost.py gpt 60

Steps with and without it take turns in the same processes: with the round of commits, the status page, the look at the
door, copies of the lanes' data and of buffers, and the record of requests and health; and without all but the last. The
ratio of each pair is with ÷ without. The comparison of replicas, which comes every hundredth step, is timed apart.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import lockstep
from lockstep.data import GlobalBatch
from lockstep.gradients.fingerprint import Drift, combined, fingerprints
from lockstep.gradients.record import StepRecord, StepRequest
from lockstep.programs.bench.report import quantile
from lockstep.programs.bench.sides import LockstepSide, make_kit
from lockstep.programs.models import reference_workload
from lockstep.run.run import Run
from lockstep.wire.generation import Generation

PAIRS = 300
DRIFT_EVERY = 100


class NoGuard:
    """What a step needs of others where nobody comes or goes."""

    looks_closely = False
    requests = (False,) * len(StepRequest)

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def begin(self, batch: GlobalBatch) -> GlobalBatch:
        return batch

    def prepared(self) -> None:
        pass

    def committed(self, record: StepRecord) -> None:
        pass

    def refuse(self, text: str) -> NoReturn:
        raise AssertionError(text)

    def note(self, text: str) -> None:
        pass

    def heal(self, drift: Drift) -> None:
        raise AssertionError("nobody looked")

    def recover(self, failure: Exception) -> bool:
        raise failure


def switches(run: Run) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions: one makes the next steps steps with recovery, the other without."""
    loop, engine, reducer = run._loop, run._engine, run.guard.generation.wire.reducer
    commit, unclosed = engine.commit, reducer.reduce_unclosed

    def on() -> None:
        loop._guard = run.guard
        engine.commit = commit  # type: ignore[method-assign]
        reducer.reduce_unclosed = unclosed  # type: ignore[method-assign]

    def off() -> None:
        loop._guard = NoGuard(run.guard.generation)
        engine.commit = lambda: None  # type: ignore[method-assign]
        reducer.reduce_unclosed = reducer.reduce  # type: ignore[method-assign]

    return on, off


def main(model: str, pairs: int) -> None:
    with lockstep.start(seed=0, drift_every=0) as run:
        side = LockstepSide(make_kit(reference_workload(model)), run)
        for number in range(10):
            side.step(number)
        on, off = switches(run)
        ratios, times = [], []
        for pair in range(pairs):
            taken = {}
            for name, switch in (("with", on), ("without", off)) if pair % 2 else (("without", off), ("with", on)):
                switch()
                began_s = time.perf_counter()
                side.step(pair)
                taken[name] = time.perf_counter() - began_s
            ratios.append(taken["with"] / taken["without"])
            times.append(taken["without"])
        on()
        usual_s = statistics.median(times)
        checks_s = [_timed(lambda: combined(fingerprints(run.state()))) for _ in range(7)]
        drift = statistics.median(checks_s) / DRIFT_EVERY / usual_s
        low, middle, high = (quantile(ratios, part) for part in (0.25, 0.5, 0.75))
        run.print(
            f"{model}: {usual_s * 1000:.1f} ms a step; with ÷ without {middle:.4f} ({low:.3f} to {high:.3f}, {pairs} "
            f"pairs); comparing replicas every {DRIFT_EVERY} steps adds {drift:.2%}"
        )


def _timed(job: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    job()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp", int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS)
