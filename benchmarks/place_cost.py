"""What it costs that workers agree on the place of every step before it counts.

    lockstep run -n 2 benchmarks/place_cost.py mlp
    lockstep run -n 2 benchmarks/place_cost.py gpt 60

Steps with and without it take turns in the same processes. With it: the script's line and whole numbers are read from
its frames, and which call runs through the lanes, generators, groups of optimizers, positions of loaders and the batch
go into the step's fingerprint, and the script's rhythm is followed. The ratio of each pair is with ÷ without.
"""

import statistics
from typing import Any, ClassVar

from paired_steps import Switch, Switches, paired, words

import lockstep
from lockstep.gradients.plan import Nowhere
from lockstep.programs.bench.report import quantile
from lockstep.programs.models import reference_workload
from lockstep.run.run import Run
from lockstep.script.call_site import Site
from lockstep.step import lane_loops


class Unplaced(Nowhere):
    """The place of a step that nobody compares."""

    settled: ClassVar[dict[str, int]] = {}


def switches(run: Run) -> tuple[Switch, Switch]:
    """Two functions: one makes the next steps steps with a place, the other without."""
    loop, places = run._loop, run._places
    whole_numbers, site_of, looping_frame = lane_loops.whole_numbers, lane_loops.site_of, lane_loops.looping_frame
    nowhere, place = Site("", 0), Unplaced()

    def on() -> None:
        lane_loops.whole_numbers, lane_loops.site_of, lane_loops.looping_frame = whole_numbers, site_of, looping_frame
        for owner, names in ((loop, ("_find_place", "_place")), (places, ("committed", "updated", "begins"))):
            for name in names:
                vars(owner).pop(name, None)

    def off() -> None:
        lane_loops.whole_numbers, lane_loops.site_of = (lambda frame: {}), (lambda frame: nowhere)
        lane_loops.looping_frame = lambda frame: frame
        vars(loop).update(_find_place=_nothing, _place=lambda batch, outside: place)
        vars(places).update(committed=_nothing, updated=_nothing, begins=_nothing)

    return on, off


def _nothing(*_: Any) -> None:
    """In place of what is left out."""


def main(model: str, pairs: int) -> None:
    with lockstep.start(seed=0, drift_every=0) as run:
        on, off = switches(run)
        taken, without = paired(run, reference_workload(model), pairs, Switches(on, off))
        ratios = [a / b for a, b in zip(taken, without, strict=True)]
        on()
        low, middle, high = (quantile(ratios, part) for part in (0.25, 0.5, 0.75))
        usual_s = statistics.median(without)
        run.print(
            f"{model}: {usual_s * 1000:.1f} ms a step; with ÷ without {middle:.4f} ({low:.3f} to {high:.3f}, "
            f"{pairs} pairs)"
        )


if __name__ == "__main__":
    main(*words())
