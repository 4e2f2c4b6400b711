"""What is to be explained, and the schedule for it."""

from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, reduction
from lockstep.programs.explain.schedules.catalogue import CATALOGUE, Algorithm, Setting, find
from lockstep.wire.schedules import Collective
from lockstep.wire.transport import Hosts

DEFAULT_WORKERS = 4
MOST_WORKERS = 64


@dataclass(frozen=True)
class ExplainRequest:
    """A collective and, where they matter, an algorithm, workers, lanes, hosts, source and chunks."""

    collective: Collective
    algorithm: str | None = None
    num_workers: int | None = None
    num_lanes: int | None = None
    workers_per_host: tuple[int, ...] | None = None
    source: int | None = None
    num_chunks: int | None = None

    @property
    def name(self) -> str:
        """The algorithm's name in the catalogue; by default the collective's first."""
        return next(iter(CATALOGUE[self.collective])) if self.algorithm is None else self.algorithm.replace("_", "-")

    def resolve(self) -> tuple[Algorithm, Setting]:
        """The algorithm and what it needs. Raises for an option that has no meaning with it."""
        algorithm = find(self.collective, self.name)
        self._check_meanings(algorithm)
        num_workers = self._workers()
        lanes = None
        if self.num_lanes is not None:
            lanes = reduction(Assignment.even(self.num_lanes, num_workers), tuple(range(self.num_lanes)))
        hosts = self._hosts(num_workers)
        return algorithm, Setting(num_workers, lanes, hosts, self.source, self.num_chunks)

    def _check_meanings(self, algorithm: Algorithm) -> None:
        given = {
            "--lanes": (self.num_lanes, "reduction"),
            "--hosts": (self.workers_per_host, "hosts"),
            "--source": (self.source, "source"),
            "--chunks": (self.num_chunks, "num_chunks"),
        }
        for option, (value, parameter) in given.items():
            if value is not None and parameter not in algorithm.parameters:
                others = CATALOGUE[self.collective].items()
                names = [name for name, other in others if parameter in other.parameters]
                for_whom = f": it is for {', '.join(names)}" if names else ""
                raise BadArgument(f"{option} has no meaning for {self.name}{for_whom}")

    def _workers(self) -> int:
        on_hosts = sum(self.workers_per_host or ())
        if self.workers_per_host and self.num_workers not in (None, on_hosts):
            raise BadArgument(f"--hosts names {on_hosts} workers, but --workers is {self.num_workers}")
        num_workers = self.num_workers or on_hosts or DEFAULT_WORKERS
        if num_workers > MOST_WORKERS:
            raise BadArgument(f"--workers must be 1 to {MOST_WORKERS}, not {num_workers}")
        return num_workers

    def _hosts(self, num_workers: int) -> Hosts:
        """The hosts asked for, or two halves: one host alone has nothing to show."""
        halves = [size for size in (num_workers - num_workers // 2, num_workers // 2) if size]
        hosts, first = [], 0
        for size in self.workers_per_host or halves:
            hosts.append(tuple(range(first, first + size)))
            first += size
        return tuple(hosts)
