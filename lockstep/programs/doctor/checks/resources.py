"""What the machine, or the container, has of everything against what the workers need.

# Note [Rough needs]
# What a worker takes depends on the model, which the doctor does not know. The numbers here are those of a worker
# with the smallest model, rounded up (230 MiB of its own, 4 threads, 30 files and 2 more for each other worker; the
# launcher holds 3 for each): with less a run cannot work, with more it may.
"""

import shlex
from math import isinf

from lockstep.programs.doctor.amounts import GiB, MiB, count, plain, size
from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding, not_known, ok, problem, warning

WORKER_BYTES = 256 * MiB
WORKER_THREADS = 8
FILES = 64
FILES_FOR_EACH_WORKER = 4
FILES_TIGHT = 1024
SHARED_TIGHT_BYTES = 256 * MiB
SHARED_FULL_BYTES = 16 * MiB
DISK_TIGHT_BYTES = 2 * GiB
DISK_FULL_BYTES = 100 * MiB


def cores(facts: Facts) -> Finding:
    usable, quota, worth = facts.cores.usable, facts.cores.quota, facts.cores.worth
    if worth is None:
        return not_known("cores", "the number of cores")
    if quota is not None and usable is not None and quota < usable:
        have = f"{count(usable, 'core')} in sight, of which the container may use {plain(quota)}"
    else:
        have = f"{plain(worth)} usable"
    workers = count(facts.num_workers, "worker")
    if facts.num_workers > worth:
        fewer = max(int(worth), 1)
        return warning("cores", f"{have}; {workers} would take turns", f"lockstep run -n {fewer} ...")
    return ok("cores", f"{have}, for {workers}")


def threads(facts: Facts) -> Finding:
    told, worth = facts.threads, facts.cores.worth
    if told is None:
        return ok("threads", "OMP_NUM_THREADS is not set: one thread for each worker unless --threads says another")
    first = told.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return problem("threads", f"OMP_NUM_THREADS={told} is not a number of threads", "unset OMP_NUM_THREADS")
    total = int(first) * facts.num_workers
    if worth is not None and total > worth and int(first) > 1:
        return warning(
            "threads",
            f"OMP_NUM_THREADS={told} makes {total} threads on {plain(worth)} cores: they hinder each other",
            "export OMP_NUM_THREADS=1 (the number of threads is part of the result: keep it for a whole run)",
        )
    return ok("threads", f"OMP_NUM_THREADS={told}, {total} in all")


def memory(facts: Facts) -> Finding:
    """See Note [Rough needs]."""
    left, limit = facts.memory.left_bytes, facts.memory.group_limit_bytes
    if left is None:
        return not_known("memory", "how much memory is free")
    have = f"{size(left)} free" + (f" (the container is limited to {size(limit)})" if limit is not None else "")
    needed = facts.num_workers * WORKER_BYTES
    if left < needed:
        return problem(
            "memory",
            f"{have}; {count(facts.num_workers, 'worker')} take {size(needed)} before the model is there, "
            "and the kernel kills a worker when memory runs out",
            f"lockstep run -n {max(left // WORKER_BYTES, 1)} ..., end other programs, or raise the container's limit "
            "(docker run --memory)",
        )
    return ok("memory", have)


def shared_memory(facts: Facts) -> Finding:
    total, free = facts.shared_memory.size_bytes, facts.shared_memory.free_bytes
    if total is None or free is None:
        return not_known("shared memory", "the size of /dev/shm")
    have = f"/dev/shm has {size(free)} free of {size(total)}"
    if free >= SHARED_TIGHT_BYTES:
        return ok("shared memory", have)
    why = "loading processes (DataLoader num_workers) hand over batches there and die of a bus error when it is full"
    larger = total < SHARED_TIGHT_BYTES
    fix = "docker run --shm-size=2g (or: mount -o remount,size=2G /dev/shm)" if larger else "ls -lS /dev/shm | head"
    tell = problem if free < SHARED_FULL_BYTES else warning
    return tell("shared memory", f"{have}: {why}", fix)


def memfd(facts: Facts) -> Finding:
    if not facts.shared_memory.memfd:
        return problem(
            "memfd",
            "the kernel gives no nameless shared memory (memfd_create), over which workers of one host exchange",
            "use Linux 3.17 or newer, and allow memfd_create in the container's seccomp profile "
            "(docker run --security-opt seccomp=unconfined shows whether that is it)",
        )
    return ok("memfd", "nameless shared memory works")


def open_files(facts: Facts) -> Finding:
    """See Note [Rough needs]."""
    soft, hard = facts.limits.open_files_soft, facts.limits.open_files_hard
    if soft is None or hard is None:
        return not_known("open files", "the limit on open files")
    needed = FILES + FILES_FOR_EACH_WORKER * facts.num_workers
    raised = f"ulimit -n {max(needed, 65536) if isinf(hard) else int(hard)}"
    if soft >= max(needed, FILES_TIGHT):
        return ok("open files", f"{_limit(soft)} at a time")
    if soft >= needed:
        why = "enough for the workers; loading processes may need one for each tensor that is under way"
        return warning("open files", f"{_limit(soft)} at a time: {why}", raised)
    sentence = f"{_limit(soft)} at a time; {count(facts.num_workers, 'worker')} may need {needed}"
    if hard >= needed:
        return problem("open files", sentence, raised)
    return problem(
        "open files",
        f"{sentence}, and the hard limit is {_limit(hard)}",
        "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536",
    )


def processes(facts: Facts) -> Finding:
    """See Note [Rough needs]."""
    left = facts.limits.processes_left
    if left is None:
        return not_known("processes", "how many processes may be started")
    needed = WORKER_THREADS * facts.num_workers
    if left < needed:
        return problem(
            "processes",
            f"{max(left, 0):.0f} more processes and threads may be started; "
            f"{count(facts.num_workers, 'worker')} need about {needed}",
            "ulimit -u unlimited, or docker run --pids-limit=-1",
        )
    return ok("processes", "as many as wanted" if isinf(left) else f"{left:.0f} more may be started")


def disk(facts: Facts) -> Finding:
    folder, free = facts.disk.folder, facts.disk.free_bytes
    if not facts.disk.writable:
        return problem("disk", f"nothing can be written in {folder}, where runs lie", "lockstep run --run-dir DIR ...")
    if free is None:
        return not_known("disk", f"how much is free in {folder}")
    if free < DISK_TIGHT_BYTES:
        tell = problem if free < DISK_FULL_BYTES else warning
        sentence = f"{size(free)} free in {folder}: little for logs and checkpoints"
        return tell("disk", sentence, f"du -sh {shlex.quote(folder)}/* | sort -h | tail")
    return ok("disk", f"{size(free)} free in {folder}")


def _limit(number: float) -> str:
    return "no limit" if isinf(number) else plain(number)
