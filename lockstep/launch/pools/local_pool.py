"""The pool of `lockstep run`: workers are processes of this host."""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from signal import SIGKILL, Signals

from lockstep.launch.channels.failure import note_of_worker
from lockstep.launch.channels.stacks import StackFile
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.host.addresses import free_port
from lockstep.launch.host.processes import Activity
from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import RESUME, Job
from lockstep.launch.pool import WorkerEvent, speaking_slot
from lockstep.launch.pools.local_workers import LocalWorkers
from lockstep.launch.pools.output import Logs, Tee
from lockstep.launch.pools.process import WorkerProcess
from lockstep.launch.pools.replacements import Copies, Spares, WorkerSpec, adopting_orphans, copied_slot
from lockstep.settings.environment import make_secret, process_environment
from lockstep.settings.environments.lockstep_run import FORKS, PARENT_PID, SECRET
from lockstep.settings.environments.place import LOOPBACK


class LocalPool:
    """See `WorkerPool`. What is started, and whose output is shown; `LocalWorkers` follow the processes."""

    def __init__(
        self, job: Job, show: Callable[[bytes], None], say: Callable[[str], None], signals: LauncherSignals
    ) -> None:
        self._job, self._show, self._say, self._signals = job, show, say, signals
        self._inherited = process_environment()
        self._workers = LocalWorkers(job.run_dir, self._settle_speaker, self._note)
        self._copies = Copies(self._workers, say, self._start_without_copy)
        self._speaker: WorkerProcess | None = None
        self._ports = (0, 0)
        """Where worker 0 listens, and a free port for a process group of the script's own."""
        self._secret = self._inherited.get(SECRET) or make_secret()
        self._extra: dict[str, str] = {}

    def __enter__(self) -> "LocalPool":
        with ExitStack() as owned:
            owned.enter_context(adopting_orphans())
            self._logs = owned.enter_context(closing(Logs(self._job.run_dir, self._say)))
            owned.enter_context(self._workers)
            owned.callback(self.end_all)
            self._spares = owned.enter_context(closing(Spares(self._workers.guard, self._start_spare)))
            self._workers.register(self._signals, lambda: None)  # it only ends the wait
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    # -- starting workers --------------------------------------------------------------------------------------

    def start(self, num_workers: int, resume: str | None = None) -> None:
        self._extra = {} if resume is None else {RESUME: resume}
        num_forks = num_workers - 1 if self._job.loads_once(self._inherited) else 0
        with socket.create_server((LOOPBACK, 0), backlog=max(128, num_workers)) as listener:
            self._ports = (listener.getsockname()[1], free_port(LOOPBACK))
            first = self._spec(num_workers, 0, listen_fd=listener.fileno())  # worker 0 alone inherits the socket
            forks = {FORKS: str(num_forks)} if num_forks else {}
            self._start(replace(first, variables={**first.variables, **forks}))
        self._let_speak(self._workers.running[0])
        for slot in range(1, num_workers):
            spec = self._spec(num_workers, slot)
            if not num_forks or not self._ask_for_copy(spec, 0, is_founder=True):
                self._start(spec)

    def replace(self, slot: int, endpoints: tuple[str, ...], num_workers: int) -> None:
        """A copy of a member takes the slot, if one can be made; else a spare, if there is one; else a new process."""
        spec = self._spec(num_workers, slot, endpoints=endpoints)
        original = copied_slot(slot, self._running_rows()) if self._job.copies else None
        if original is None or not self._ask_for_copy(spec, original):
            self._start_without_copy(spec)

    def keep_spares(self, number: int) -> None:
        self._spares.keep(number)

    @property
    def obstacles(self) -> Mapping[str, None]:
        return self._copies.obstacles

    def _spec(
        self, num_workers: int, slot: int, listen_fd: int | None = None, endpoints: tuple[str, ...] = ()
    ) -> WorkerSpec:
        boot = replace(self._workers.boot(slot, endpoints, self._secret), listen_fd=listen_fd)
        variables = {**self._extra, **self._job.variables_of_one(boot, num_workers, *self._ports)}
        return WorkerSpec(boot, variables, self._logs.of(slot))

    def _ask_for_copy(self, spec: WorkerSpec, original: int, *, is_founder: bool = False) -> bool:
        tee = Tee(self._show, spec.log)
        return self._copies.ask(spec, self._workers.running[original], tee, is_founder=is_founder)

    def _start_without_copy(self, spec: WorkerSpec) -> None:
        spare = self._spares.take(spec.variables)
        if spare is None:
            self._start(spec)
            return
        self._workers.follow(worker := spare.as_worker(spec.boot.slot, spec.log))
        self._copies.listen(worker)
        self._spares.keep(self._job.spares)

    def _start(self, spec: WorkerSpec) -> None:
        more_fds = [] if spec.boot.listen_fd is None else [spec.boot.listen_fd]
        tee, variables = Tee(self._show, spec.log), self._variables(spec.variables)
        worker = self._workers.start(self._job.command(), variables, tee, spec.boot.slot, more_fds)
        self._copies.listen(worker)

    def _start_spare(self, part_fd: int) -> WorkerProcess:
        variables = self._variables({PARENT_PID: str(os.getpid())})
        fds = [part_fd, *self._workers.inherited_fds]
        return WorkerProcess.start(self._job.spare_command(part_fd), variables, Tee(self._show), fds)

    def _variables(self, own: Mapping[str, str]) -> dict[str, str]:
        return {**self._job.variables_of_all(self._inherited), **own}

    # -- following workers -------------------------------------------------------------------------------------

    @property
    def running(self) -> Mapping[int, str]:
        return {slot: worker.id for slot, worker in self._workers.running.items()}

    def wait(self, within_s: float) -> list[WorkerEvent]:
        return self._workers.wait(within_s)

    def _note(self, worker: WorkerProcess, note: str) -> None:
        if worker is not self._speaker:
            self._say(note_of_worker(worker.slot, note))

    def _settle_speaker(self) -> None:
        """Shows the output of the member with rank 0; while there is none, the last speaker stays."""
        slot = speaking_slot(self._running_rows())
        if slot is not None and self._workers.running[slot] is not self._speaker:
            self._let_speak(self._workers.running[slot])

    def _let_speak(self, worker: WorkerProcess) -> None:
        if self._speaker is not None and self._speaker in (*self._workers.running.values(), *self._workers.past):
            self._speaker.tee.drain()
            self._speaker.tee.shown = False
        self._speaker = worker
        worker.tee.shown = True

    # -- what is known of them ---------------------------------------------------------------------------------

    def _running_rows(self) -> dict[int, StatusRow]:
        return {slot: self.row(slot) for slot in self._workers.running}

    def row(self, slot: int) -> StatusRow:
        return self._workers.page.row(slot)

    def rows(self) -> Mapping[int, StatusRow]:
        return self._workers.page.rows()

    def give_up(self, slot: int) -> None:
        if slot not in self._workers.running:
            self._workers.page.give_up(slot)

    def state(self, slot: int) -> str:
        return self._workers.state(slot)

    def activity(self, slot: int) -> Activity:
        return self._workers.activity(slot)

    def ask_stack(self, slot: int) -> StackFile | None:
        return self._workers.ask_stack(slot)

    # -- ending workers ----------------------------------------------------------------------------------------

    def send(self, slot: int, signum: Signals) -> None:
        if slot in self._workers.running:
            self._workers.running[slot].send(signum)

    def end(self, slot: int) -> None:
        self._copies.settle(slot)
        if slot in self._workers.running:
            self._workers.running[slot].send_to_group(SIGKILL)

    def end_all(self) -> None:
        self._copies.settle_all()
        self._workers.end_all()
