"""POSIX semaphores in shared memory, by the C library that every Python has loaded.

# Note [Semaphores as signals]
# Workers share memory and signal by semaphores when it may be read. `sem_post` releases and a successful `sem_wait`
# acquires, on every processor, so what was written before the post is seen after the wait: plain loads and stores would
# not promise that on Arm. A post that no worker waits for costs no system call; a waiting worker sleeps in the kernel.
# It wakes up every LOOK_S to see whether the workers that it waits for are alive: a semaphore cannot show that.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable

SEMAPHORE_BYTES = 64
"""A cache line each, so that two workers' signals do not slow each other down."""

LOOK_S = 0.1
"""How long a worker waits at most before it checks whether its peers are alive."""

SPINS = 150
"""How often an impatient wait tries before it sleeps: about as long as waking up takes."""

_libc = ctypes.CDLL(None, use_errno=True)  # lets other threads of this process run while it waits
_quick = ctypes.PyDLL(None)  # for calls that return at once: keeps the interpreter lock, which is faster


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., int] | None:
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
    return function


_init = _function(_libc, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_post = _function(_quick, "sem_post", ctypes.c_void_p)
_try = _function(_quick, "sem_trywait", ctypes.c_void_p)
_timed = _function(_libc, "sem_timedwait", ctypes.c_void_p, ctypes.c_void_p)
_clocked = _function(_libc, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

available = None not in (_init, _post, _try, _timed)
"""Whether this system has semaphores for several processes."""

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def initialize(address: int) -> None:
    """Makes a semaphore with count 0 at an address in shared memory. Once, by one process, before others use it."""
    assert _init is not None
    if _init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def post(address: int) -> None:
    """Adds one. The worker that takes it sees all that this worker wrote before."""
    assert _post is not None
    _post(address)


def take(address: int) -> bool:
    """Takes one if there is one; never waits."""
    assert _try is not None
    return _try(address) == 0


def wait(address: int, spins: int = 0) -> bool:
    """Takes one, waiting for it at most LOOK_S; False if there was none. `spins`: tries before it sleeps."""
    for _ in range(spins + 1):
        if take(address):
            return True
    return _sleep(address)


def _sleep(address: int) -> bool:
    if _clocked is not None:
        failed = _clocked(address, time.CLOCK_MONOTONIC, _deadline(time.CLOCK_MONOTONIC))
    else:
        assert _timed is not None
        failed = _timed(address, _deadline(time.CLOCK_REALTIME))
    if not failed:
        return True
    if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "waiting for a semaphore failed")
    return False


def _deadline(clock: int) -> object:
    nanoseconds = time.clock_gettime_ns(clock) + int(LOOK_S * 1e9)
    return ctypes.byref(_Timespec(*divmod(nanoseconds, 10**9)))
