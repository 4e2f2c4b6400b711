"""Pods of an Indexed Job, played by machines: an index whose process fails is started again, as Kubernetes does.

No Kubernetes runs here. What is real: a network address, a name, processes and a death for each pod, the variables that
a pod is given, and the rule that an exit code other than 0 has the index started anew.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from machines import INTERFACE, Machine, machines, worker_environment

MOST_RESTARTS = 3


@dataclass
class Pod:
    """One index, its present process, and what all of its processes have printed."""

    index: int
    machine: Machine
    command: Sequence[str]
    environ: Mapping[str, str]
    codes: list[int] = field(default_factory=list)
    output: str = ""
    process: "subprocess.Popen[str] | None" = None

    def run(self, restarts: bool) -> None:
        """To its end, or until it has failed too often."""
        while not self.codes or (restarts and self.codes[-1] != 0 and len(self.codes) <= MOST_RESTARTS):
            self.process = subprocess.Popen(
                self.machine.command(*self.command),
                env=worker_environment({**self.environ, "JOB_COMPLETION_INDEX": str(self.index)}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            with self.process:
                self.output += self.process.communicate()[0]
            self.codes.append(self.process.returncode)

    def kill(self) -> None:
        """The pod's machine loses its power."""
        assert self.process is not None
        self.process.kill()


@contextmanager
def indexed_job(
    num_pods: int, folder: Path, script: Path, *arguments: str, environ: Mapping[str, str], restarts: bool = True
) -> Iterator[list[Pod]]:
    """The pods of a job, which are running; afterwards all have ended."""
    names = [f"train-{index}.train" for index in range(num_pods)]
    with machines(names, folder) as (found, _):
        given = {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": names[0], **environ}
        command = (sys.executable, str(script), str(folder), *arguments)
        pods = [Pod(index, machine, command, given) for index, machine in enumerate(found)]
        threads = [threading.Thread(target=pod.run, args=(restarts,)) for pod in pods]
        for thread in threads:
            thread.start()
        try:
            yield pods
            for thread in threads:
                thread.join()
        finally:
            for pod, thread in zip(pods, threads, strict=True):
                while thread.is_alive():
                    pod.codes.extend([0])
                    pod.kill()
                    thread.join(1)
