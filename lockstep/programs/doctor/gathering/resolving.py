"""Asking for the host's own name, without waiting longer than one may."""

import socket
import time
from queue import Empty, SimpleQueue
from threading import Thread

from lockstep.programs.doctor.facts import HostName


def resolve_own_name(waited_s: float) -> HostName:
    """What the host's name resolves to. An answer that takes longer than `waited_s` is left to itself."""
    name = socket.gethostname()
    answers: SimpleQueue[tuple[str, ...]] = SimpleQueue()
    began_s = time.monotonic()
    # getaddrinfo knows no time limit; a daemon does not keep the program from ending
    Thread(target=lambda: answers.put(_addresses(name)), daemon=True).start()
    try:
        addresses = answers.get(timeout=waited_s)
    except Empty:
        return HostName(name, waited_s=waited_s)
    return HostName(name, addresses, time.monotonic() - began_s, waited_s)


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
