"""The pool of `lockstep run`: workers are processes of this host, from their start until nothing of them is left."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from lockstep.errors import BadEnvironment
from lockstep.launch.channels.control import ControlLine, CopyDeclined, CopyStarted
from lockstep.launch.channels.failure import Failure, NoticePipe, clear_report, note_of_worker, read_report
from lockstep.launch.channels.stacks import STACK_SIGNAL, StackFile
from lockstep.launch.channels.status import StatusPage, StatusRow
from lockstep.launch.host.addresses import free_port
from lockstep.launch.host.memory import MemoryKills
from lockstep.launch.host.orphans import OrphanGuard
from lockstep.launch.host.processes import Activity, activity, await_end, members, process_state, survives_signal
from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import RESUME, Job
from lockstep.launch.pool import ExitStatus, WorkerEvent, speaking_slot
from lockstep.launch.pools.output import Log, Logs, Tee
from lockstep.launch.pools.process import KILL_WAIT_S, NO_SLOT, STRAY_GRACE_S, WorkerProcess
from lockstep.launch.pools.replacements import PendingCopy, Spares, WorkerSpec, adopting_orphans, copied_slot
from lockstep.settings.environment import make_secret, process_environment
from lockstep.settings.environments.lockstep_run import FORKS, PARENT_PID, SECRET, Bootstrap
from lockstep.settings.environments.place import LOOPBACK

MEMORY_LOOK_S = 0.25
FOUNDER_END_S = 0.1
"""A process that ends closes its files a moment before it has ended."""


class LocalPool:
    """See `WorkerPool`. Owns the processes, the page and the logs of one launch."""

    def __init__(
        self, job: Job, show: Callable[[bytes], None], say: Callable[[str], None], signals: LauncherSignals
    ) -> None:
        self._job, self._show, self._say, self._signals = job, show, say, signals
        self._inherited = process_environment()
        self._workers: dict[int, WorkerProcess] = {}
        self._past: list[WorkerProcess] = []
        """Workers that have ended, until nothing of them is left."""
        self._reported: list[WorkerProcess] = []
        self._ended: list[WorkerProcess] = []
        self._copies: dict[int, PendingCopy] = {}
        self._to_be_forked: set[int] = set()
        """Founders that the first worker forks. See Note [Loaded once] in load_once.py."""
        self._loads_apart = False
        self._speaker: WorkerProcess | None = None
        self._reports: dict[str, Failure] = {}
        self._ports = (0, 0)
        self._secret = self._inherited.get(SECRET) or make_secret()
        self._extra: dict[str, str] = {}
        self._memory_kills = MemoryKills()
        self._next_memory_look_s = 0.0
        self.obstacles: dict[str, None] = {}
        """Each once, in the order in which they were reported."""

    def __enter__(self) -> "LocalPool":
        with ExitStack() as owned:
            owned.enter_context(adopting_orphans())
            self._guard = owned.enter_context(OrphanGuard())
            self._selector = owned.enter_context(selectors.DefaultSelector())
            self._page = owned.enter_context(StatusPage())
            self._logs = owned.enter_context(closing(Logs(self._job.run_dir, self._say)))
            self._notices = owned.enter_context(closing(NoticePipe()))
            self._selector.register(self._notices, selectors.EVENT_READ, self._noticed)
            owned.callback(self.end_all)
            self._spares = owned.enter_context(closing(Spares(self._guard, self._start_spare)))
            self._selector.register(self._signals, selectors.EVENT_READ, lambda: None)  # it only ends the wait
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
        self._let_speak(self._workers[0])
        for slot in range(1, num_workers):
            spec = self._spec(num_workers, slot)
            if num_forks and self._ask_for_copy(spec, self._workers[0]):
                self._to_be_forked.add(slot)
            else:
                self._start(spec)

    def replace(self, slot: int, endpoints: tuple[str, ...], num_workers: int) -> None:
        """A copy of a member takes the slot, if one can be made; else a spare, if there is one; else a new process."""
        self._to_be_forked.discard(slot)
        spec = self._spec(num_workers, slot, endpoints=endpoints)
        original = self._copied_worker(slot) if self._job.copies else None
        if original is None or not self._ask_for_copy(spec, original):
            self._start_without_copy(spec)

    def keep_spares(self, number: int) -> None:
        self._spares.keep(number)

    def _spec(
        self, num_workers: int, slot: int, listen_fd: int | None = None, endpoints: tuple[str, ...] = ()
    ) -> WorkerSpec:
        """What to start in the slot, after an earlier worker, its status row and its report are gone."""
        if (dismissed := self._workers.get(slot)) is not None:
            dismissed.send_to_group(signal.SIGKILL)
            await_end([dismissed.pid], KILL_WAIT_S)
            self._retire(dismissed)
        self._page.clear(slot)
        clear_report(self._job.run_dir, slot)
        boot = Bootstrap(
            slot=slot,
            parent_pid=os.getpid(),
            run_dir=self._job.run_dir.absolute(),
            notice_fd=self._notices.worker_fd,
            listen_fd=listen_fd,
            status_fd=self._page.fd,
            endpoints=endpoints,
            secret=self._secret,
        )
        variables = {**self._extra, **self._job.variables_of_one(boot, num_workers, *self._ports)}
        return WorkerSpec(boot, variables, self._logs.of(slot))

    def _start_without_copy(self, spec: WorkerSpec) -> None:
        spare = self._spares.take(spec.variables)
        if spare is None:
            self._start(spec)
            return
        self._follow(spare.as_worker(spec.boot.slot, spec.log))
        self._spares.keep(self._job.spares)

    def _start(self, spec: WorkerSpec) -> None:
        inherited_fds = [self._notices.worker_fd, self._page.fd, *filter(None, [spec.boot.listen_fd])]
        try:
            worker = self._start_process(self._job.command(), spec.variables, inherited_fds, spec.log, spec.boot.slot)
        except OSError as error:
            raise BadEnvironment(f"worker {spec.boot.slot} cannot be started: {error.strerror}") from error
        self._guard.note(worker.group)
        self._follow(worker)

    def _start_spare(self, part_fd: int) -> WorkerProcess:
        inherited_fds = [part_fd, self._notices.worker_fd, self._page.fd]
        return self._start_process(self._job.spare_command(part_fd), {PARENT_PID: str(os.getpid())}, inherited_fds)

    def _start_process(
        self,
        command: list[str],
        own: Mapping[str, str],
        fds: list[int],
        log: Log | None = None,
        slot: int = NO_SLOT,
    ) -> WorkerProcess:
        variables = {**self._job.variables_of_all(self._inherited), **own}
        return WorkerProcess.start(command, variables, Tee(self._show, log), fds, slot)

    # -- copies: see Note [Replacement by a copy] in control.py, and Note [Loaded once] in load_once.py ---------

    def _copied_worker(self, slot: int) -> WorkerProcess | None:
        original = copied_slot(slot, {other: self._page.row(other) for other in self._workers})
        return None if original is None else self._workers[original]

    def _ask_for_copy(self, spec: WorkerSpec, original: WorkerProcess) -> bool:
        """Whether the request for a copy has reached the worker."""
        slot, tee, control = spec.boot.slot, Tee(self._show, spec.log), ControlLine()
        asked = original.control.ask_for_copy(slot, spec.variables, tee.writer(), control.worker_fd)
        tee.close_worker_end()
        control.close_worker_end()
        copy = PendingCopy(spec, tee, control, original)
        if not asked:
            copy.close()
            return False
        self._copies[slot] = copy
        self._selector.register(control, selectors.EVENT_READ, partial(self._copy_started, copy))
        return True

    def _copy_started(self, copy: PendingCopy) -> None:
        """The copy has reported its process, or its end of the socket was closed because it was not made."""
        slot, answer = copy.spec.boot.slot, copy.control.answer()
        if self._copies.get(slot) is not copy:
            return
        self._forget(copy)
        if not self._adopted(copy, answer) and (
            slot not in self._to_be_forked or not await_end([copy.of.pid], FOUNDER_END_S)
        ):
            self._start_without_copy(copy.spec)  # else all start again, or none

    def _adopted(self, copy: PendingCopy, answer: CopyStarted | CopyDeclined | None) -> bool:
        """Whether the copy runs; it is followed now."""
        pid = answer.pid if isinstance(answer, CopyStarted) else None
        worker = None if pid is None else WorkerProcess.adopt(pid, copy.tee, copy.control, copy.spec.boot.slot)
        if worker is None:
            copy.close()
            return False
        self._guard.note(worker.group)
        self._follow(worker)
        return True

    def _answered(self, worker: WorkerProcess) -> None:
        """A worker has declined to be copied, or has ended."""
        answer = worker.control.answer()
        if not isinstance(answer, CopyDeclined):
            self._unregister(worker.control)
        elif answer.slot in self._to_be_forked:
            if not self._loads_apart:
                self._loads_apart = True
                self._say(f"  each worker loads torch for itself: {answer.why}")
        elif answer.why not in self.obstacles:
            self.obstacles[answer.why] = None
            self._say(
                f"  worker {worker.slot} cannot be copied ({answer.why}): a new process takes the place of one lost"
            )

    def _forget(self, copy: PendingCopy) -> None:
        self._unregister(copy.control)
        self._copies.pop(copy.spec.boot.slot, None)

    # -- following workers -------------------------------------------------------------------------------------

    @property
    def running(self) -> Mapping[int, str]:
        return {slot: worker.id for slot, worker in self._workers.items()}

    def wait(self, within_s: float) -> list[WorkerEvent]:
        for key, _ in self._selector.select(max(0.0, within_s)):
            key.data()
        self._sweep()
        if (now_s := time.monotonic()) >= self._next_memory_look_s:
            self._next_memory_look_s = now_s + MEMORY_LOOK_S
            self._memory_kills.recent(now_s)
        reported, ended, self._reported, self._ended = self._reported, self._ended, [], []
        return [
            *(WorkerEvent(worker.slot, worker.id, self._report(worker)) for worker in reported),
            *(self._exit_of(worker) for worker in ended),
        ]

    def _follow(self, worker: WorkerProcess) -> None:
        self._workers[worker.slot] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._see_end, worker))
        self._selector.register(worker.tee, selectors.EVENT_READ, partial(self._pump, worker))
        self._selector.register(worker.control, selectors.EVENT_READ, partial(self._answered, worker))

    def _see_end(self, worker: WorkerProcess) -> None:
        self._retire(worker)
        worker.send_to_group(signal.SIGTERM)
        self._ended.append(worker)

    def _exit_of(self, worker: WorkerProcess) -> WorkerEvent:
        described = ExitStatus.of(worker.exit_status or 0, lambda: self._memory_kills.recent(time.monotonic()))
        return WorkerEvent(worker.slot, worker.id, self._report(worker), described, worker.ended_s)

    def _report(self, worker: WorkerProcess) -> Failure | None:
        report = self._reports.get(worker.id) or read_report(self._job.run_dir, worker.slot)
        return report if report is not None and report.worker_id == worker.id else None

    def _noticed(self) -> None:
        """See Note [Notices] in failure.py."""
        by_id = {worker.id: worker for worker in self._workers.values()}
        for notice in self._notices.read():
            if notice.report is not None:
                self._reports[notice.worker_id] = notice.report
            worker = by_id.get(notice.worker_id)
            if worker is None:
                continue
            if not notice.note:
                self._reported.append(worker)
            elif worker is not self._speaker:
                self._say(note_of_worker(worker.slot, notice.note))

    def _unregister(self, file: ControlLine | Tee) -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)

    # -- their output ------------------------------------------------------------------------------------------

    def _pump(self, worker: WorkerProcess) -> None:
        self._settle_speaker()
        if not worker.tee.pump():
            self._selector.unregister(worker.tee)

    def _settle_speaker(self) -> None:
        """Shows the output of the member with rank 0; while there is none, the last speaker stays."""
        slot = speaking_slot({slot: self._page.row(slot) for slot in self._workers})
        if slot is not None and self._workers[slot] is not self._speaker:
            self._let_speak(self._workers[slot])

    def _let_speak(self, worker: WorkerProcess) -> None:
        if self._speaker is not None and self._speaker in (*self._workers.values(), *self._past):
            self._speaker.tee.drain()
            self._speaker.tee.shown = False
        self._speaker = worker
        worker.tee.shown = True

    # -- what is known of them ---------------------------------------------------------------------------------

    def row(self, slot: int) -> StatusRow:
        return self._page.row(slot)

    def rows(self) -> Mapping[int, StatusRow]:
        return self._page.rows()

    def give_up(self, slot: int) -> None:
        if slot not in self._workers:
            self._page.give_up(slot)

    def state(self, slot: int) -> str:
        process = process_state(self._workers[slot].pid)
        return "X" if process is None else process.state

    def activity(self, slot: int) -> Activity:
        return activity(members({self._workers[slot].group}))

    def ask_stack(self, slot: int) -> StackFile | None:
        """A process without its handler yet would die of the signal, so it gets none."""
        if not survives_signal(self._workers[slot].pid, STACK_SIGNAL):
            return None
        query = StackFile.of(self._job.run_dir, slot)
        self.send(slot, STACK_SIGNAL)
        return query

    # -- ending workers ----------------------------------------------------------------------------------------

    def send(self, slot: int, signum: signal.Signals) -> None:
        if slot in self._workers:
            self._workers[slot].send(signum)

    def end(self, slot: int) -> None:
        if slot in self._copies:
            copy = self._copies[slot]
            self._forget(copy)
            self._adopted(copy, copy.control.answer())
        if slot in self._workers:
            self._workers[slot].send_to_group(signal.SIGKILL)

    def end_all(self) -> None:
        self._end_copies()
        ended = {worker.group for worker in self._past}
        await_end(set(members(ended)) - ended, STRAY_GRACE_S)
        everyone = [*self._past, *self._workers.values()]
        pids = members({worker.group for worker in everyone})
        for worker in everyone:
            worker.send_to_group(signal.SIGKILL)
        await_end(pids, KILL_WAIT_S)
        for worker in everyone:
            worker.reap_children()
        for worker in list(self._workers.values()):
            self._retire(worker)
        for worker in everyone:
            self._clear_away(worker)
        self._ended, self._reported = [], []

    def _end_copies(self) -> None:
        """Those that are requested, too: once the original is dead, its copy has reported itself or was never made."""
        copies = list(self._copies.values())
        for copy in copies:
            copy.of.send_to_group(signal.SIGKILL)
        for copy in copies:
            self._forget(copy)
            self._adopted(copy, copy.control.await_answer(KILL_WAIT_S))

    def _retire(self, worker: WorkerProcess) -> None:
        """Moves an ended worker to `_past`, after all its output is passed on.

        Its traceback goes to the log alone: the screen gets the launcher's short message.
        """
        self._selector.unregister(worker.pidfd)
        self._unregister(worker.control)
        worker.note_end()
        self._settle_speaker()
        worker.tee.drain()
        report = self._report(worker)
        if report is not None and worker.tee.log is not None:
            worker.tee.log.write(report.traceback.encode(errors="backslashreplace"))
        del self._workers[worker.slot]
        self._past.append(worker)

    def _sweep(self) -> None:
        """Kills what ended workers left behind, after STRAY_GRACE_S to end by itself."""
        due_s = time.monotonic() - STRAY_GRACE_S
        for worker in [worker for worker in self._past if worker.ended_s <= due_s]:
            worker.send_to_group(signal.SIGKILL)
            worker.reap_children()
            if set(members({worker.group})) <= {worker.pid}:
                self._clear_away(worker)

    def _clear_away(self, worker: WorkerProcess) -> None:
        self._past.remove(worker)
        worker.tee.drain()
        self._unregister(worker.tee)
        self._guard.clear(worker.group)
        worker.reap()
