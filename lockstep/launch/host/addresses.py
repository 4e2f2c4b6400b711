"""Addresses and ports of this host."""

import socket

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def free_port(address: str = "") -> int:
    """A port that is free on this host now, at `address` or everywhere."""
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def interface_of(address: str) -> str:
    """The network interface that has the address; "" if none has. Gloo would take that of the host's name."""
    cards = psutil.net_if_addrs().items()
    return next((name for name, entries in cards if any(entry.address == address for entry in entries)), "")


def is_loopback(address: str) -> bool:
    """Whether only processes of its own host can use the address."""
    return address.startswith("127.")
