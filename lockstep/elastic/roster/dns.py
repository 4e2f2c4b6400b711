"""A roster that is kept by nobody: members are the addresses of a name, at one port. A headless service, say."""

import json
import socket
from contextlib import suppress

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.roster import ROSTER


class NamesHome:
    """The addresses that a name has in DNS now. Nothing can be written there."""

    is_private = False
    is_written = False

    def __init__(self, name: str) -> None:
        self._name, _, port = name.rpartition(":")
        if not self._name or not port.isdigit():
            raise BadEnvironment(f"{ROSTER}=dns://{name} cannot be used: it looks like dns://name:port")
        self.endpoint_port = int(port)

    def __str__(self) -> str:
        return f"dns://{self._name}:{self.endpoint_port}"

    def entries(self) -> dict[str, str]:
        addresses: list[str] = []
        with suppress(socket.gaierror):  # nobody is there yet
            found = socket.getaddrinfo(self._name, self.endpoint_port, socket.AF_INET, socket.SOCK_STREAM)
            addresses = sorted({f"{where[0]!s}:{self.endpoint_port}" for *_, where in found})
        return {"members": json.dumps({"founding": 0, "generation": 0, "beat": 0, "addresses": addresses})}

    def put(self, key: str, text: str) -> None:
        """The name follows those who live, by itself."""

    def put_first(self, key: str, text: str) -> str:
        raise OSError(
            f"names in DNS ({self}) cannot decide who founds a run, or which half goes on: set RANK and WORLD_SIZE, or "
            "keep the roster in a folder"
        )

    def close(self) -> None:
        """It holds nothing."""
