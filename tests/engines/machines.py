"""Machines for tests of engines: network namespaces of `hosts.py`, each with its own name, processes and `/etc/hosts`.

A program that is booted on a machine is process 1 there: to kill it is to cut the power, since the kernel ends all that
it has started. What is run on a machine, of short life, has processes of its own as well.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import INTERFACE, NAMESPACES, Network, address, hosts

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "build/engines"

# The shell stays as process 1, because it waits for orphans, which daemons do not.
_BOOT = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && "$@"; exit $?'
_LOGGED_IN = ("env", "-i", "HOME=/root", "PATH=/usr/bin:/bin:/usr/sbin:/sbin")
_OF_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "LOCKSTEP_", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")
_UNSHARED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Machine:
    """One machine: what runs there sees its name, its address, and those of the others."""

    name: str
    address: str
    namespace: str
    names: Path

    def command(self, *argv: str) -> list[str]:
        """The same command, on this machine. Its first process is the machine's: who kills it kills all."""
        boot = ("sh", "-c", _BOOT, "sh", self.name, str(self.names))
        return ["nsenter", f"--net={NAMESPACES / self.namespace}", *_UNSHARED, *boot, *argv]

    def cut(self, network: Network, number: int) -> None:
        """Nothing comes from this machine any more, and nobody is told."""
        switch = network.namespaces[0].rsplit("-", 1)[0] + "-switch"
        subprocess.run(["ip", "-n", switch, "link", "set", f"port{number}", "nomaster"], check=True)


@contextmanager
def machines(names: Sequence[str], folder: Path) -> Iterator[tuple[list[Machine], Network]]:
    """As many machines as names are given, which find each other by them."""
    for command in ("unshare", "nsenter"):
        if shutil.which(command) is None:
            pytest.skip(f"machines of an engine need the command {command} (package util-linux)")
    with hosts([1] * len(names)) as network:
        file = folder / "hosts"
        lines = [f"{address(number)} {name}\n" for number, name in enumerate(names)]
        file.write_text("127.0.0.1 localhost\n" + "".join(lines))
        yield (
            [
                Machine(name, address(number), namespace, file)
                for number, (name, namespace) in enumerate(zip(names, network.namespaces, strict=True))
            ],
            network,
        )


def remote_shell(reached: Sequence[Machine], path: Path) -> Path:
    """A program that does what `ssh NAME COMMAND` does, for these machines; it hands on no variables.

    Each call has a folder of its own for temporary files: processes of two machines, or of two calls, may have the same
    number.
    """
    commands = {machine.name: shlex.join(machine.command(*_LOGGED_IN)) for machine in reached}
    cases = [f'{name}) {command} "TMPDIR=$own" sh -c "$*";;' for name, command in commands.items()]
    lines = [
        "#!/bin/sh",
        'while [ "$1" = -x ]; do shift; done',  # the option that Hydra gives to ssh
        f"own=$(mktemp -d {shlex.quote(str(path.parent))}/tmp-XXXXXX)",
        'name="$1"; shift',
        *('case "$name" in', *cases, "*) exit 255;;", "esac"),
        "code=$?; [ $code = 137 ] && exit 255; exit $code",  # a machine that is gone
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def engine(name: str) -> Path:
    """The folder of an engine that `install.py` has brought. Skips the test where it is not."""
    folder = ENGINES / name
    if not (folder / "whole").exists():
        pytest.skip(f"{name} is not here: make test-engines brings it to build/engines")
    return folder


def worker_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process, less those of launchers, for workers that import this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


__all__ = ["ENGINES", "INTERFACE", "ROOT", "Machine", "engine", "machines", "remote_shell", "worker_environment"]
