"""Where a roster is kept: texts by key, that outlive the workers who wrote them."""

from typing import Protocol

from lockstep.elastic.roster.dns import NamesHome
from lockstep.elastic.roster.folder import FolderHome
from lockstep.elastic.roster.tcp import StoreHome
from lockstep.errors import BadEnvironment
from lockstep.settings.environments.roster import ROSTER

KINDS = "a folder's path, tcp://host:port, dns://name:port or ray://name"


class RosterHome(Protocol):
    """A home of rosters. Methods may be called from any thread, and raise OSError when the home cannot be reached.

    `is_private`: only the user's own processes can read it. `is_written`: something can be written there.
    `endpoint_port`: where members listen, if that is fixed.
    """

    is_private: bool
    is_written: bool
    endpoint_port: int

    def entries(self) -> dict[str, str]:
        """All texts by key."""

    def put(self, key: str, text: str) -> None:
        """Afterwards `text` stands under `key`."""

    def put_first(self, key: str, text: str) -> str:
        """Atomic. What stands under `key`: `text`, if nobody had written there before."""

    def close(self) -> None:
        """Gives back what this process holds of the home."""


def open_home(url: str, secret: bytes) -> RosterHome:
    """The home that `url` names. Raises BadEnvironment if it cannot be used."""
    kind, separator, rest = url.partition("://")
    if not separator or kind == "file":
        return FolderHome(rest if separator else url)
    if kind == "tcp":
        return StoreHome(rest, secret)
    if kind == "dns":
        return NamesHome(rest)
    if kind == "ray":
        return _ray_home(rest)
    raise BadEnvironment(f"{ROSTER}={url} cannot be used: it is {KINDS}")


def _ray_home(name: str) -> RosterHome:
    try:
        from lockstep.elastic.roster.ray_actor import RayHome
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise BadEnvironment(
            f"{ROSTER}=ray://{name} needs Ray, which is not installed: pip install 'torch-lockstep[ray]'"
        ) from error
    return RayHome(name)
