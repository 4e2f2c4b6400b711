"""The processes of one launch, from their start until nothing of them is left."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType

from lockstep.errors import BadEnvironment
from lockstep.launch.control import ControlLine, Declined, Started
from lockstep.launch.copies import Copy, Wanted, adopting_orphans, copied_slot
from lockstep.launch.failure import Failure, clear_report, read_notice, read_report
from lockstep.launch.job import RESUME, Job
from lockstep.launch.orphans import Guard
from lockstep.launch.output import Log, Logs, Tee, clear_earlier
from lockstep.launch.process import WorkerProcess, await_end, members
from lockstep.launch.scale import Registered
from lockstep.launch.signals import SCALE, Signals
from lockstep.launch.spares import Spares
from lockstep.launch.status import StatusPage, StatusRow
from lockstep.launch.supervision import speaking_slot
from lockstep.settings.environments.lockstep_run import PARENT_PID, Bootstrap, Doors
from lockstep.settings.environments.place import LOOPBACK

# Children of an ended worker get this long to end by themselves: Python's resource tracker needs a moment to
# remove the shared memory that its process left.
STRAY_GRACE_S = 0.3
KILL_WAIT_S = 5.0


class Crew:
    """Owns the processes of one launch: starts them, follows them, and clears them away.

    `wait` follows them. What happened meanwhile stands in `reported` and `ended` (to be taken from there), in
    `interrupts` (Ctrl-C and SIGTERM) and `scale_asked`. `running` has every worker whose process has not ended.
    Output that cannot be shown (`unshown` says why) is like SIGTERM.
    """

    def __init__(
        self, job: Job, inherited: Mapping[str, str], show: Callable[[bytes], None], say: Callable[[str], None]
    ) -> None:
        self._job, self._inherited, self._show, self._say = job, inherited, show, say
        self.running: dict[int, WorkerProcess] = {}
        self.reported: list[WorkerProcess] = []
        self.ended: list[WorkerProcess] = []
        self.interrupts: list[signal.Signals] = []
        self.scale_asked = False
        self._past: list[WorkerProcess] = []
        self._speaker: WorkerProcess | None = None
        self.unshown: OSError | None = None
        self._reports: dict[int, Failure] = {}
        self._half_notice = b""
        self._ports = (0, 0)
        self._extra: dict[str, str] = {}
        self._copies: dict[int, Copy] = {}
        self.obstacles: dict[str, None] = {}
        """Why workers could not be copied, in the order in which it was told."""

    def __enter__(self) -> "Crew":
        with ExitStack() as owned:
            self._signals = owned.enter_context(Signals())
            owned.enter_context(adopting_orphans())
            owned.enter_context(Registered(self._job.run_dir, self._say))
            self._guard = owned.enter_context(Guard())
            self._selector = owned.enter_context(selectors.DefaultSelector())
            self._page = owned.enter_context(StatusPage())
            clear_earlier(self._job.run_dir)
            self._logs = owned.enter_context(closing(Logs(self._job.run_dir, self._say)))
            self._open_notices(owned)
            owned.callback(self.clear_away)
            self.spares = owned.enter_context(closing(Spares(self._job.spares, self._guard, self._start_spare)))
            self._selector.register(self._signals, selectors.EVENT_READ, self._signalled)
            self._owned = owned.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()

    def found(self, num_workers: int, resume: str | None = None) -> None:
        """Starts the workers that found the run, together. `resume` goes over the job's own word."""
        self._extra = {} if resume is None else {RESUME: resume}
        with socket.create_server((LOOPBACK, 0), backlog=max(128, num_workers)) as listener:
            self._ports = (listener.getsockname()[1], _free_port())
            for slot in range(num_workers):
                self._make_room(slot)
                # Worker 0 alone inherits the listening socket.
                boot = self._boot(slot, listen_fd=listener.fileno() if slot == 0 else None)
                self._start(boot, self._variables(boot, num_workers), self._logs.of(slot))
        self._let_speak(self.running[0])

    def join(self, slot: int, doors: Doors, num_workers: int) -> None:
        """Starts a worker that asks the members behind the doors to admit it.

        A copy of a member, if one can be made; else a spare, if there is one; else a new process.
        """
        boot = self._boot(slot, doors=doors)
        self._make_room(slot)
        wanted = Wanted(boot, self._variables(boot, num_workers), self._logs.of(slot))
        if not self._ask_for_copy(wanted):
            self._start_afresh(wanted)

    def _start_afresh(self, wanted: Wanted) -> None:
        spare = self.spares.take(wanted.variables)
        if spare is None:
            self._start(wanted.boot, wanted.variables, wanted.log)
            return
        spare.slot, spare.tee.log = wanted.boot.slot, wanted.log
        self._follow(spare)
        self.spares.fill()

    # -- copies: see Note [Replacement by a copy] in control.py ------------------------------------------------

    def _ask_for_copy(self, wanted: Wanted) -> bool:
        """Whether a member was asked to make a copy of itself."""
        slot = wanted.boot.slot
        rows = {other: self._page.row(other) for other in self.running}
        original = copied_slot(slot, rows) if self._job.copies else None
        if original is None:
            return False
        tee, control = Tee(self._show_output, wanted.log), ControlLine()
        line = self.running[original].control
        asked = line.ask_for_copy(slot, wanted.variables, tee.writer(), control.worker_fd)
        tee.handed_down()
        control.handed_down()
        copy = Copy(wanted, self.running[original], tee, control)
        if not asked:
            copy.close()
            return False
        self._copies[slot] = copy
        self._selector.register(control, selectors.EVENT_READ, partial(self._copy_started, copy))
        return True

    def _copy_started(self, copy: Copy) -> None:
        """The copy says which process it is; or its end of the socket was closed, because it will never be."""
        slot, answer = copy.wanted.boot.slot, copy.control.answer()
        if self._copies.get(slot) is not copy:
            return
        self._forget(copy)
        worker = WorkerProcess.adopt(answer.pid, copy.tee, copy.control, slot) if isinstance(answer, Started) else None
        if worker is None:
            copy.close()
            self._start_afresh(copy.wanted)
            return
        self._guard.note(worker.group)
        self._follow(worker)

    def _answered(self, worker: WorkerProcess) -> None:
        """A worker cannot be copied, and says why; or it has ended."""
        answer = worker.control.answer()
        if not isinstance(answer, Declined):
            self._unregister(worker.control)
            return
        if answer.why not in self.obstacles:
            self.obstacles[answer.why] = None
            self._say(
                f"  worker {worker.slot} cannot be copied ({answer.why}): a new process takes the place of one lost"
            )

    def _forget(self, copy: Copy) -> None:
        self._unregister(copy.control)
        self._copies.pop(copy.wanted.boot.slot, None)

    def _unregister(self, file: ControlLine) -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def wait(self, within_s: float) -> None:
        """Follows the workers until something happens, for `within_s` at most."""
        for key, _ in self._selector.select(max(0.0, within_s)):
            key.data()
        self._sweep()

    def give_up(self, slot: int) -> None:
        """The workers know that nobody will come in this slot any more."""
        if slot not in self.running:
            self._page.give_up(slot)

    def row(self, slot: int) -> StatusRow:
        """What the worker in `slot`, or the last one there, says of itself on the status page."""
        return self._page.row(slot)

    @property
    def has_started(self) -> bool:
        """Whether a worker of this start has called `lockstep.start`."""
        return bool(self._page.rows())

    @property
    def has_saved(self) -> bool:
        """Whether a worker has saved the run because it is about to end."""
        return any(row.saved for row in self._page.rows().values())

    def report(self, worker: WorkerProcess) -> Failure | None:
        """How the worker failed, if it has told."""
        found = self._reports.get(worker.pid) or read_report(self._job.run_dir, worker.slot)
        return found if found is not None and found.pid == worker.pid else None

    def dismiss(self, slot: int) -> None:
        """Ends a worker at once; its end will be seen as every other."""
        if slot in self._copies:
            copy = self._copies[slot]
            self._forget(copy)
            copy.close()
        if slot in self.running:
            self.running[slot].send_to_group(signal.SIGKILL)

    def clear_away(self) -> None:
        """Afterwards no process of any worker's group is left, and every log is whole."""
        for slot in list(self._copies):
            self.dismiss(slot)
        ended = {worker.group for worker in self._past}
        await_end(set(members(ended)) - ended, STRAY_GRACE_S)
        everyone = [*self._past, *self.running.values()]
        pids = members({worker.group for worker in everyone})
        for worker in everyone:
            worker.send_to_group(signal.SIGKILL)
        await_end(pids, KILL_WAIT_S)
        for worker in everyone:
            worker.reap_children()
        for worker in list(self.running.values()):
            self._see_off(worker)
        for worker in everyone:
            self._put_away(worker)
        self.ended, self.reported = [], []

    def _boot(self, slot: int, listen_fd: int | None = None, doors: Doors = ()) -> Bootstrap:
        return Bootstrap(
            rank=slot,
            parent_pid=os.getpid(),
            run_dir=self._job.run_dir.absolute(),
            notice_fd=self._notice_fd,
            listen_fd=listen_fd,
            status_fd=self._page.fd,
            doors=doors,
        )

    def _variables(self, boot: Bootstrap, num_workers: int) -> dict[str, str]:
        return {**self._extra, **self._job.variables_of_one(boot, num_workers, *self._ports)}

    def _start(self, boot: Bootstrap, variables: Mapping[str, str], log: Log) -> None:
        everyones = self._job.variables_of_all(self._inherited)
        handed_down = [self._notice_fd, self._page.fd, *([] if boot.listen_fd is None else [boot.listen_fd])]
        tee = Tee(self._show_output, log)
        try:
            worker = WorkerProcess.start(self._job.command(), {**everyones, **variables}, tee, handed_down, boot.slot)
        except OSError as error:
            raise BadEnvironment(f"worker {boot.slot} cannot be started: {error.strerror}") from error
        self._guard.note(worker.group)
        self._follow(worker)

    def _start_spare(self, part_fd: int) -> WorkerProcess:
        variables = {**self._job.variables_of_all(self._inherited), PARENT_PID: str(os.getpid())}
        handed_down = [part_fd, self._notice_fd, self._page.fd]
        return WorkerProcess.start(self._job.spare_command(part_fd), variables, Tee(self._show_output), handed_down)

    def _make_room(self, slot: int) -> None:
        """Nothing that an earlier worker in the slot left is taken for the new one's, and it is gone itself."""
        if (dismissed := self.running.get(slot)) is not None:
            dismissed.send_to_group(signal.SIGKILL)
            await_end([dismissed.pid], KILL_WAIT_S)
            self._see_off(dismissed)
        self._page.clear(slot)
        clear_report(self._job.run_dir, slot)

    def _follow(self, worker: WorkerProcess) -> None:
        self.running[worker.slot] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, partial(self._ended, worker))
        self._selector.register(worker.tee, selectors.EVENT_READ, partial(self._pump, worker))
        self._selector.register(worker.control, selectors.EVENT_READ, partial(self._answered, worker))

    def _ended(self, worker: WorkerProcess) -> None:
        self._see_off(worker)
        worker.send_to_group(signal.SIGTERM)
        self.ended.append(worker)

    def _see_off(self, worker: WorkerProcess) -> None:
        """The worker is of the past; what it wrote is passed on, and its traceback is in the log.

        The traceback goes to the log alone: the speaker's stderr is the screen, where it is told in short.
        """
        self._selector.unregister(worker.pidfd)
        self._unregister(worker.control)
        worker.note_end()
        self._settle_speaker()
        worker.tee.drain()
        report = self.report(worker)
        if report is not None and worker.tee.log is not None:
            worker.tee.log.write(report.traceback.encode(errors="backslashreplace"))
        del self.running[worker.slot]
        self._past.append(worker)

    def _sweep(self) -> None:
        """Clears away what ended workers left, once it had its moment to end by itself."""
        due_s = time.monotonic() - STRAY_GRACE_S
        for worker in [worker for worker in self._past if worker.ended_s <= due_s]:
            worker.send_to_group(signal.SIGKILL)
            worker.reap_children()
            if set(members({worker.group})) <= {worker.pid}:
                self._put_away(worker)

    def _put_away(self, worker: WorkerProcess) -> None:
        self._past.remove(worker)
        worker.tee.drain()
        if worker.tee in self._selector.get_map():
            self._selector.unregister(worker.tee)
        self._guard.clear(worker.group)
        worker.reap()

    def _pump(self, worker: WorkerProcess) -> None:
        self._settle_speaker()
        if not worker.tee.pump():
            self._selector.unregister(worker.tee)

    def _show_output(self, output: bytes) -> None:
        if self.unshown is None:
            try:
                self._show(output)
            except OSError as error:
                self.unshown = error
                self.interrupts.append(signal.SIGTERM)

    def _settle_speaker(self) -> None:
        """The member with rank 0 speaks. Before there is one, and while there is none, it is whoever did so last."""
        slot = speaking_slot({slot: self._page.row(slot) for slot in self.running})
        if slot is not None and self.running[slot] is not self._speaker:
            self._let_speak(self.running[slot])

    def _let_speak(self, worker: WorkerProcess) -> None:
        if self._speaker is not None and self._speaker in (*self.running.values(), *self._past):
            self._speaker.tee.drain()
            self._speaker.tee.shown = False
        self._speaker = worker
        worker.tee.shown = True

    def _open_notices(self, owned: ExitStack) -> None:
        self._notices, self._notice_fd = os.pipe()
        for fd in (self._notices, self._notice_fd):
            owned.callback(os.close, fd)
        self._selector.register(self._notices, selectors.EVENT_READ, self._noticed)

    def _noticed(self) -> None:
        """See Note [Notices] in failure.py."""
        *lines, self._half_notice = (self._half_notice + os.read(self._notices, 1 << 16)).split(b"\n")
        notices = dict(map(read_notice, lines))
        self._reports |= {pid: report for pid, report in notices.items() if report is not None}
        self.reported += [worker for worker in self.running.values() if worker.pid in notices]

    def _signalled(self) -> None:
        signals = self._signals.take()
        self.scale_asked |= SCALE in signals
        self.interrupts += [signum for signum in signals if signum != SCALE]


def _free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
