"""Exit codes of `lockstep run`, and those by which a worker reports to its launcher why it ends."""

DONE, USER_ERROR, USAGE, ENVIRONMENT, WORKER_LOST = 0, 1, 2, 3, 4
CTRL_C, TERMINATED = 130, 143
NO_MOMENT = (
    "the script has come to no moment at which it could be, as the end of an epoch of run.epochs, or a batch that is "
    "asked of a loader of run.shard"
)
"""Why a run was not saved before a signal ended it."""

AT_ONCE = "the second signal has ended the workers at once"
"""The same, where nobody waited for such a moment."""

LEFT_OUT = 75
"""The others went on without this live worker: it counts as lost, and is replaced."""

MISPLACED = 76
"""The worker joined a run under way, and its script was not where the others' were."""


class OutOfPlace(SystemExit):
    """A joiner leaves the run, because its script is not where the others' are. They go on without it.

    It ends the process, also through `except Exception`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(MISPLACED)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
