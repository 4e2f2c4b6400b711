"""What a kill cost, from the log of commits. Nothing runs here.

# Note [What counts as going on]
# A step that was under way may still be committed after the kill, if the victim had done its part: that is luck, not
# recovery. So the clock stops at the first commit of a group that was formed after the kill, and only at a step that
# nobody had committed before: steps that are done again bring nothing new. It is read by the worker with rank 0.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.errors import LockstepError
from lockstep.programs.bench.recovery.commits import Commit, last_step


class NotRecovered(LockstepError):  # noqa: N818
    """No step was committed after the kill."""


@dataclass(frozen=True)
class Recovery:
    """Seconds from the kill until the next step was committed, and until one was by as many workers as before.

    `whole_s` is None if the run ended first. `steps_lost` had been committed and were computed again.
    """

    next_s: float
    whole_s: float | None
    steps_lost: int


def recovery_from(commits: Sequence[Commit], killed_s: float, num_workers: int) -> Recovery:
    """See Note [What counts as going on]."""
    old = max(commit.generation for commit in commits if commit.time_s <= killed_s)
    done = last_step(commit for commit in commits if commit.generation <= old)
    after = [commit for commit in commits if commit.generation > old and commit.rank == 0]
    new = [commit for commit in after if commit.step > done]
    if not new:
        raise NotRecovered(f"no step after step {done} was committed when a worker had been killed")
    whole = [commit for commit in new if commit.size == num_workers]
    return Recovery(
        next_s=min(commit.time_s for commit in new) - killed_s,
        whole_s=min(commit.time_s for commit in whole) - killed_s if whole else None,
        steps_lost=max(0, done + 1 - min(commit.step for commit in after)),
    )


def usual_step_s(commits: Sequence[Commit]) -> float:
    """The median time between two commits of the worker with rank 0; 0 as long as there are not two."""
    times = [commit.time_s for commit in commits if commit.rank == 0]
    return statistics.median([later - earlier for earlier, later in pairwise(times)] or [0.0])
