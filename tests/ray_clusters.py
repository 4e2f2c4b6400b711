"""Ray clusters for tests: nodes on this machine, or one in each network namespace.

A node is `ray start`, which leaves processes behind that are nobody's children. All of them carry a variable, by which
`kill_node` and the end of the cluster find them. Each cluster has a folder for all that Ray writes, and a token there.
"""

import importlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[1]
IMPORTABLE = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
MARK = "LOCKSTEP_TEST_NODE"
START_S = 240
HAS_RAY = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("ray._raylet") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'torch-lockstep[ray]'")


@dataclass
class RayCluster:
    """The nodes that were started, by number; node 0 is the head. `variables` are what a process needs to join."""

    folder: str
    variables: Mapping[str, str]
    address: str = ""
    inside: tuple[Sequence[str], ...] = ()
    """The words that start a program on each host, such as `ip netns exec NAME`; this host where there are none."""
    num_nodes: int = field(default=0)

    def add_node(self, num_cpus: int, ip: str | None = None) -> int:
        """Starts a node; the first is the head. Gives its number."""
        number, self.num_nodes = self.num_nodes, self.num_nodes + 1
        if number == 0:
            self.address = f"{ip or '127.0.0.1'}:{_free_port()}"
        head = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        words = [
            *(self.inside[number] if self.inside else ()),
            *(sys.executable, "-m", "ray.scripts.scripts", "start"),
            *(head if number == 0 else [f"--address={self.address}"]),
            *([] if ip is None else [f"--node-ip-address={ip}"]),
            *(f"--num-cpus={num_cpus}", "--disable-usage-stats", "--object-store-memory=100000000"),
        ]
        with open(Path(self.folder, f"node-{number}.out"), "w") as out:
            marked = {**os.environ, **self.variables, MARK: self._mark(number)}
            started = subprocess.run(words, env=marked, stdout=out, stderr=out, timeout=START_S, check=False)
        assert started.returncode == 0, Path(self.folder, f"node-{number}.out").read_text()
        return number

    def kill_node(self, number: int) -> None:
        """All processes of the node die at once, the workers there too."""
        _kill_marked(self._mark(number))

    def close(self) -> None:
        _kill_marked(f"{self.folder}/")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mark(self, number: int) -> str:
        return f"{self.folder}/{number}."


@contextmanager
def ray_cluster(
    *num_cpus: int, inside: tuple[Sequence[str], ...] = (), ips: Sequence[str] = ()
) -> Iterator[RayCluster]:
    """A cluster with nodes of so many CPUs."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are limited
    cluster = RayCluster(folder, _variables(folder), inside=inside)
    try:
        for number, cpus in enumerate(num_cpus):
            cluster.add_node(cpus, ips[number] if ips else None)
        yield cluster
    finally:
        cluster.close()


@contextmanager
def joined(cluster: RayCluster) -> Iterator[None]:
    """Inside, this process belongs to the cluster."""
    before = {name: os.environ.get(name) for name in cluster.variables}
    os.environ.update(cluster.variables)
    ray = importlib.import_module("ray")
    # Ray reads these variables once, when it is imported.
    tokens = importlib.import_module("ray._private.authentication_test_utils")
    tokens.reset_auth_token_state()
    try:
        runtime_env = {"env_vars": {"PYTHONPATH": IMPORTABLE}}
        ray.init(cluster.address, log_to_driver=False, namespace="lockstep", runtime_env=runtime_env)
        yield
    finally:
        ray.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _variables(folder: str) -> dict[str, str]:
    token = Path(folder, "token")  # else Ray writes one into the home folder
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else all other processes of a busy machine come first
        "PYTHONPATH": IMPORTABLE,
    }


def _kill_marked(mark: str) -> None:
    """Processes that start others may do so while they are looked for."""
    while marked := [process for process in psutil.process_iter() if _mark_of(process).startswith(mark)]:
        for process in marked:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=10)


def _mark_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return str(process.environ().get(MARK, ""))
    return ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
