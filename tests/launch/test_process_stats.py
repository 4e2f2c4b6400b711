"""What the kernel says of real processes."""

import os
import signal
import subprocess
import sys

from lockstep.launch.host.processes import activity, survives_signal
from lockstep.launch.supervision.hangs import Observation, shows_work


def seen() -> Observation:
    return Observation(activity([os.getpid()]), 0)


def test_processor_time_and_bytes_of_this_process_are_signs_of_work():
    before = seen()
    while not seen().activity.cpu_s > before.activity.cpu_s + 0.05:
        pass
    assert shows_work(before, seen(), 5.0)
    before = seen()
    reader, writer = os.pipe()
    os.write(writer, b"hello")
    os.close(reader)
    os.close(writer)
    assert seen().activity.io_bytes >= before.activity.io_bytes + 5


def test_a_process_that_waits_for_ever_shows_no_sign_of_work():
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as sleeper:
        sleeper.stdout.readline()
        while activity([sleeper.pid]) != (then := activity([sleeper.pid])):
            pass
        assert not shows_work(Observation(then, 0), Observation(activity([sleeper.pid]), 0), 5.0)
        assert then.processes == {sleeper.pid}
        assert list(then.wakes) == [sleeper.pid]
        sleeper.kill()


def test_whether_a_process_would_survive_a_signal_is_known_before_it_is_sent():
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        assert not survives_signal(os.getpid(), signal.SIGUSR2)
        for handler in (signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGUSR2, handler)
            assert survives_signal(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_of_a_process_that_is_gone_nothing_is_known():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert (activity([gone.pid]).processes, survives_signal(gone.pid, signal.SIGUSR2)) == (frozenset(), False)
