"""Exit codes: those of `lockstep run`, and those by which a worker's launcher knows why it ends."""

DONE, USER_ERROR, USAGE, ENVIRONMENT, WORKER_LOST = 0, 1, 2, 3, 4
CTRL_C, TERMINATED = 130, 143

LEFT_OUT = 75
"""A worker that lives, and that the others go on without: it counts as lost, and is replaced."""

MISPLACED = 76
"""A worker that joined a run under way and did not find its place in the script: it gives its place up."""


class OutOfPlace(SystemExit):
    """A worker that joined a run gives its place up: its script is not where the others' are. They go on without it.

    It ends the process, also through `except Exception`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(MISPLACED)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
