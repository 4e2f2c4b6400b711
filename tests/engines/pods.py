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

import psutil
from machines import INTERFACE, Machine, machines, worker_environment

MOST_RESTARTS = 3
JOB_S = 200.0
"""How long a pod may take when the test has done all that it does."""


@dataclass
class Pod:
    """One index and its present process. What all of its processes print is in `log`."""

    index: int
    machine: Machine
    command: Sequence[str]
    environ: Mapping[str, str]
    log: Path
    codes: list[int] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def run(self, restarts: bool) -> None:
        """To its end, or until it has failed too often."""
        while not self.codes or (restarts and self.codes[-1] != 0 and len(self.codes) <= MOST_RESTARTS):
            environ = worker_environment({**self.environ, "JOB_COMPLETION_INDEX": str(self.index)})
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.machine.command(*self.command),
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.process.wait()
            self.codes.append(self.process.returncode)

    def tell(self) -> None:
        """The script's process gets SIGTERM, as the first process of a pod does."""
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        next(process for process in found if process.name().startswith("python")).terminate()

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
        pods = [Pod(index, machine, command, given, folder / f"pod-{index}") for index, machine in enumerate(found)]
        threads = [threading.Thread(target=pod.run, args=(restarts,)) for pod in pods]
        for thread in threads:
            thread.start()
        try:
            yield pods
            for pod, thread in zip(pods, threads, strict=True):
                thread.join(JOB_S)
                assert not thread.is_alive(), f"pod {pod.index} did not end:\n{pod.output}"
        finally:
            for pod, thread in zip(pods, threads, strict=True):
                while thread.is_alive():
                    pod.codes.extend([0])
                    pod.kill()
                    thread.join(1)
