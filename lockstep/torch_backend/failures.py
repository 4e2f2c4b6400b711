"""How a group's failures reach the caller of torch.distributed."""

from collections.abc import Sequence

from torch.distributed import DistBackendError

from lockstep.errors import BadArgument, Disagreement, PeerGone

SHARED = (Disagreement, BadArgument)
"""Errors that all members raise at the same call, after which the group can be used on. All others end it."""


class RankGone(PeerGone, DistBackendError):  # noqa: N818
    """A member stopped answering: also a RuntimeError, as scripts expect of a backend. `rank` is the global one."""


def told(error: BaseException, global_ranks: Sequence[int]) -> BaseException:
    """The error as the caller should see it: a group's own ranks mean nothing outside of it."""
    if isinstance(error, PeerGone) and not isinstance(error, RankGone):
        gone = RankGone(global_ranks[error.rank], error.cause)
        gone.__cause__ = error
        return gone
    return error
