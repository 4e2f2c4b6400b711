"""The address at which workers on other hosts reach this one."""

import socket
from contextlib import suppress

import psutil

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LOOPBACK, LaunchPlace

_ELSEWHERE = ("198.18.0.1", 9)
"""An address of no host (RFC 2544): the kernel says from which of its own it would be reached, and sends nothing."""


def address_of_this_host(place: LaunchPlace) -> str:
    """What the user said; else worker 0's is known to all, and others look from where they would reach it."""
    if place.own_address:
        return _checked(place.own_address)
    if place.port and place.world.rank == 0 and not place.agent_store:
        return place.address
    found = _towards((place.address, place.port) if place.port else _ELSEWHERE)
    return found or _of_an_interface() or LOOPBACK


def _towards(target: tuple[str, int]) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(target)
        address: str = asked.getsockname()[0]
        return address
    return ""


def _of_an_interface() -> str:
    """Where there is no route to elsewhere: the first address that is not this host's alone."""
    cards = psutil.net_if_addrs().values()
    found = [entry.address for card in cards for entry in card if entry.family is socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), "")


def _checked(address: str) -> str:
    try:
        found = str(socket.gethostbyname(address))
    except OSError as error:
        raise BadEnvironment(f"LOCKSTEP_ADDRESS={address} cannot be used: {error.strerror}") from error
    if found.startswith("127."):
        raise BadEnvironment(
            f"LOCKSTEP_ADDRESS={address} is {found}, which other hosts cannot reach: give an address of a network card"
        )
    return found
