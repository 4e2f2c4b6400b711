"""A roster that a named Ray actor keeps: `ray://NAME`. Imports Ray, and is imported only for such an address.

# Note [Who keeps the actor]
# An actor that is made here is detached: it outlives the process that made it, as a roster must, until the cluster ends
# or `ray.kill` ends it. Ray Train's controller makes its own (`lockstep/ray`), which ends with it. The actor is not
# restarted: a roster that has forgotten who was first would elect twice. It is on the head, without which there is no
# cluster: on any other node it would be lost with that node, and no replacement could find the members.
"""

import logging
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from lockstep.errors import BadEnvironment
from lockstep.launch.host.folder import check_name
from lockstep.launch.pools.ray_cluster import NAMESPACE, first_line

ANSWER_S = 10.0
HEAD = "node:__internal_head__"
"""A resource that Ray gives the head alone."""
START_S = 120.0
"""How long an actor that was just made may take to answer: Ray starts a process for it."""


class RosterActor:
    """The entries, in the memory of an actor. Its methods run one after the other: `put_first` is atomic."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def entries(self) -> dict[str, str]:
        return self._entries

    def put(self, key: str, text: str) -> None:
        self._entries[key] = text

    def put_first(self, key: str, text: str) -> str:
        return self._entries.setdefault(key, text)


def make_actor(name: str, lifetime: str | None = "detached") -> Any:
    """The actor of this name, made if there is none. See Note [Who keeps the actor]."""
    check_name(name)
    remote = ray.remote(num_cpus=0, max_restarts=0, resources={HEAD: 0.001})(RosterActor)
    return remote.options(name=name, namespace=NAMESPACE, get_if_exists=True, lifetime=lifetime).remote()


class RayHome:
    """See `RosterHome`. Raises ConnectionError when the actor is gone or does not answer."""

    is_private = False
    is_written = True
    endpoint_port = 0

    def __init__(self, name: str) -> None:
        """Joins the cluster of this host, unless this process belongs to one already."""
        check_name(name)
        self._name, self._has_joined = name, not ray.is_initialized()
        try:
            if self._has_joined:
                ray.init("auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            self._actor = make_actor(name)
            ray.get(self._actor.entries.remote(), timeout=START_S)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise BadEnvironment(
                f"the roster ray://{name} cannot be reached: {first_line(error)}. This host must belong to a Ray "
                "cluster (`ray start`), and the cluster must answer"
            ) from error

    def __str__(self) -> str:
        return f"ray://{self._name}"

    def entries(self) -> dict[str, str]:
        return dict(self._ask(self._actor.entries.remote()))

    def put(self, key: str, text: str) -> None:
        self._ask(self._actor.put.remote(key, text))

    def put_first(self, key: str, text: str) -> str:
        return str(self._ask(self._actor.put_first.remote(key, text)))

    def close(self) -> None:
        if self._has_joined:
            with suppress(RayError):
                ray.shutdown()

    def _ask(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=ANSWER_S)
        except (RayError, GetTimeoutError) as error:
            why = "does not answer" if isinstance(error, GetTimeoutError) else "is gone"
            raise ConnectionError(f"the roster {self} {why}: {first_line(error)}") from error
