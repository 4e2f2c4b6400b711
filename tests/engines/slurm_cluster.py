"""A real Slurm cluster for tests: a controller and nodes, each on a machine of its own, without installing anything.

`with cluster(folder) as slurm: slurm.run("srun", "-n", "3", "python", "train.py")`. Commands are run on the machine
`login`, where the controller is too. A node is a machine that runs `slurmd`.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from hosts import Network
from machines import Machine, engine, machines, worker_environment

LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
READY_S = 60.0

_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PluginDir={libraries}/slurm-wlm
StateSaveLocation={folder}/controller
SlurmctldLogFile={folder}/controller.log
SlurmctldPidFile={folder}/controller.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=30
MinJobAge=300
ReturnToService=2
NodeName={nodes} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up. `daemons` are the first processes of its machines, by name."""

    root: Path
    folder: Path
    login: Machine
    nodes: dict[str, Machine]
    network: Network
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def popen(self, *argv: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A command of Slurm on the machine `login`, in the cluster's folder; what it prints is one stream."""
        program = str(self.root / "usr/bin" / argv[0])
        return subprocess.Popen(
            self.login.command(program, *argv[1:]),
            cwd=self.folder,
            env=worker_environment({**self._variables, **(environ or {})}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *argv: str, environ: Mapping[str, str] | None = None, limit_s: float = 150.0) -> tuple[int, str]:
        """The exit code of a command, and what it printed."""
        with self.popen(*argv, environ=environ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                raise AssertionError(f"{' '.join(argv)} took more than {limit_s:g} s:\n{output}") from None
        return process.returncode, output

    def start_node(self, name: str) -> None:
        slurmd = self.root / "usr/sbin/slurmd-wlm"
        stepd = self.root / "usr/sbin/slurmstepd-wlm"
        (self.folder / name).mkdir(exist_ok=True)
        self._boot(self.nodes[name], str(slurmd), "-D", "-N", name, "-d", str(stepd))

    def start_controller(self) -> None:
        (self.folder / "controller").mkdir(exist_ok=True)
        self._boot(self.login, str(self.root / "usr/sbin/slurmctld-wlm"), "-D")

    def cut_power(self, name: str) -> None:
        """The node is gone, with all that ran there."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def states(self) -> dict[str, str]:
        """The state of each node."""
        _, output = self.run("sinfo", "--noheader", "--Node", "--format", "%N %T", "--partition", "batch", limit_s=30)
        return dict(line.split() for line in output.splitlines() if len(line.split()) == 2)

    def await_idle(self) -> None:
        self.await_that(lambda: set(self.states().values()) == {"idle"} and len(self.states()) == len(self.nodes))

    def await_quiet(self) -> None:
        """Nothing runs on the nodes any more but their daemons."""
        self.await_that(lambda: not any(name.startswith("slurmstepd") for name in self._process_names()))

    def await_that(self, holds: Callable[[], bool], limit_s: float = READY_S) -> None:
        """Slurm can only be asked again and again."""
        until_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < until_s, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in found)

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()

    def _process_names(self) -> Iterator[str]:
        for daemon in self.daemons.values():
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(daemon.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        yield process.name()

    def _boot(self, machine: Machine, *argv: str) -> None:
        output = (self.folder / f"{machine.name}.log").open("ab")
        with output:
            self.daemons[machine.name] = subprocess.Popen(
                machine.command(*argv),
                cwd=self.folder,
                env=worker_environment(self._variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def _variables(self) -> dict[str, str]:
        libraries = self.root / LIBRARIES
        return {
            "PATH": f"{self.root}/usr/bin:{worker_environment()['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{libraries}/slurm-wlm:{libraries}",
        }


@contextmanager
def cluster(folder: Path, num_nodes: int = 3, more: str = "") -> Iterator[Cluster]:
    """A cluster whose nodes `n1`, `n2` and so on are idle; `more` is added to its settings.

    Skips the test where Slurm or machines cannot be had.
    """
    root, names = engine("slurm"), [f"n{number}" for number in range(1, num_nodes + 1)]
    with ExitStack() as stack:
        (login, *nodes), network = stack.enter_context(machines(["login", *names], folder))
        usual = _CONFIGURATION.format(folder=folder, libraries=root / LIBRARIES, nodes=f"n[1-{num_nodes}]")
        (folder / "slurm.conf").write_text(f"{usual}{more}\n")
        slurm = Cluster(root, folder, login, dict(zip(names, nodes, strict=True)), network)
        stack.callback(slurm.close)
        slurm.start_controller()
        for name in names:
            slurm.start_node(name)
        slurm.await_idle()
        yield slurm
