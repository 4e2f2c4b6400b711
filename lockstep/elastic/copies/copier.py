"""Makes copies of this worker where the launcher asks for them. See Note [Replacement by a copy] in control.py."""

import os
from collections.abc import Callable, Collection

from lockstep.elastic.copies.fork import ForkedCopy, fork
from lockstep.elastic.copies.obstacles import obstacle
from lockstep.launch.channels.control import Control, CopyRequest
from lockstep.launch.worker.fork import CannotFork


class Copier:
    """One worker's way to be copied. `ports` are those of lockstep's sockets, `loader_pids` its loader processes."""

    def __init__(
        self,
        control: Control,
        ports: Callable[[], Collection[int]],
        loader_pids: Callable[[], Collection[int]],
    ) -> None:
        self._control, self._ports, self._loader_pids = control, ports, loader_pids
        self.has_declined = False
        """Whether a copy was asked for that could not be made."""
        self._request: CopyRequest | None = None
        self._copied: ForkedCopy | None = None
        self._ready: int | None = None

    def is_asked(self) -> bool:
        """Whether the launcher wants a copy. 2 us."""
        if self._request is None:
            self._request = self._control.asked()
        return self._request is not None

    def copy(self) -> int | None:
        """Forks, if that is asked for and can be done. In the copy: its slot. In the original: None.

        The original returns when the copy has asked to be admitted. No wire may be open.
        """
        request, self._request = self._request, None
        if request is None:
            return None
        why = obstacle(self._ports(), self._loader_pids())
        if why is not None:
            self._decline(request, why)
            return None
        try:
            made = fork(request)
        except CannotFork as error:
            self._decline(request, str(error))
            return None
        if isinstance(made, ForkedCopy):
            self._copied = made
            made.await_claim()
            return None
        self._control, self._ready = Control(request.control_fd), made
        self._control.report_started()
        return request.slot

    def _decline(self, request: CopyRequest, why: str) -> None:
        self.has_declined = True
        self._control.decline(request, why)

    def has_called(self) -> None:
        """The copy has asked to be admitted: the original may go on."""
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None

    def settle(self, slots: Collection[int]) -> None:
        """A generation with these slots is formed: a copy that is not in it comes too late."""
        copied, self._copied = self._copied, None
        if copied is not None and copied.slot not in slots:
            copied.end()

    def close(self) -> None:
        self._control.close()
