"""What is to be explained, and what its schedule depends on."""

from collections.abc import Sequence
from itertools import accumulate

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, reduction
from lockstep.programs.explain.schedules.catalogue import CATALOGUE, Algorithm, Setting, find
from lockstep.wire.schedules import Collective

DEFAULT_WORKERS = 4
MOST_WORKERS = 64


def resolve(
    collective: Collective,
    algorithm: str | None = None,
    num_workers: int | None = None,
    num_lanes: int | None = None,
    workers_per_host: Sequence[int] | None = None,
    source: int | None = None,
    num_chunks: int | None = None,
) -> tuple[str, Algorithm, Setting]:
    """The algorithm, by default the collective's first, by its name in the catalogue, and what it needs.

    Raises for an option that has no meaning with it.
    """
    name = next(iter(CATALOGUE[collective])) if algorithm is None else algorithm.replace("_", "-")
    chosen = find(collective, name)
    given = {
        "--lanes": (num_lanes, "reduction"),
        "--hosts": (workers_per_host, "hosts"),
        "--source": (source, "source"),
        "--chunks": (num_chunks, "num_chunks"),
    }
    for option, (value, parameter) in given.items():
        if value is not None and parameter not in chosen.parameters:
            names = [other for other, found in CATALOGUE[collective].items() if parameter in found.parameters]
            raise BadArgument(
                f"{option} has no meaning for {name}" + (f": it is for {', '.join(names)}" if names else "")
            )
    on_hosts = sum(workers_per_host or ())
    if workers_per_host and num_workers not in (None, on_hosts):
        raise BadArgument(f"--hosts names {on_hosts} workers, but --workers is {num_workers}")
    count = num_workers or on_hosts or DEFAULT_WORKERS
    if count > MOST_WORKERS:
        raise BadArgument(f"--workers must be 1 to {MOST_WORKERS}, not {count}")
    lanes = None if num_lanes is None else reduction(Assignment.even(num_lanes, count), tuple(range(num_lanes)))
    # By default two halves: one host alone has nothing to show.
    sizes = workers_per_host or [size for size in (count - count // 2, count // 2) if size]
    hosts = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True))
    return name, chosen, Setting(count, lanes, hosts, source, num_chunks)
