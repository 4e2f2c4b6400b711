"""The checks: pure functions from facts to a result each. A new one is a function and its place in _IN_ORDER.

# Note [Rough needs]
# What a worker takes depends on the model, which the doctor does not know. The numbers here are those of a worker
# with the smallest model, rounded up (230 MiB of its own, 4 threads, 30 files and 2 more for each other worker; the
# launcher holds 3 for each): with less a run cannot work, with more it may.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from math import isinf
from types import MappingProxyType

from lockstep.launch.supervision.messages import count
from lockstep.programs.doctor.diagnosis import (
    CheckResult,
    Diagnosis,
    GiB,
    MiB,
    not_known,
    ok,
    plain,
    problem,
    size,
    warning,
)
from lockstep.programs.doctor.facts import Facts

PYTHON = (3, 11)
NEEDED = MappingProxyType({"torch": (2, 11), "click": (8, 1), "rich": (13,), "safetensors": (0, 5), "psutil": (5, 9)})
"""The oldest version of each that works, as in pyproject.toml."""
FAST = (0, 45)
OURS = "torch-lockstep"
ON_ARM = ("aarch64", "arm64")
EXTRAS = {
    "notebook": ("cloudpickle", "lockstep.launch"),
    "cuda": ("cuda-bindings", "workers that share a GPU"),
    "cudnn": ("nvidia-cudnn-frontend", "faster exact attention on a GPU"),
    "ray": ("ray", "lockstep run --on ray"),
    "transformers": ("transformers", "Hugging Face's Trainer"),
    "lightning": ("lightning", "Lightning and Fabric"),
}
"""Besides `fast`, which has a check of its own: the package of each, and what it is for."""
WORKER_BYTES = 256 * MiB
WORKER_THREADS = 8
FILES = 64
FILES_FOR_EACH_WORKER = 4
FILES_TIGHT = 1024
SHARED_TIGHT_BYTES = 256 * MiB
SHARED_FULL_BYTES = 16 * MiB
DISK_TIGHT_BYTES = 2 * GiB
DISK_FULL_BYTES = 100 * MiB
SLOW_S = 0.5
MOST_NAMED = 50


def python(facts: Facts) -> CheckResult:
    version = _text(facts.python)
    if facts.python < PYTHON:
        return problem(
            f"Python {version} is too old, lockstep needs {_text(PYTHON)}",
            f"make an environment with a newer one: python{_text(PYTHON)} -m venv .venv",
        )
    return ok(f"Python {version}")


def lockstep(facts: Facts) -> CheckResult:
    running, installed = facts.running, facts.installed.get(OURS)
    if installed is None:
        return warning(
            f"lockstep {running} runs from its source folder and is not installed: scripts elsewhere cannot import it",
            "pip install -e .",
        )
    if installed != running:
        return warning(
            f"the code is lockstep {running} and the installation says {installed}: one of them is left from before",
            "pip install --force-reinstall --no-deps torch-lockstep (or `pip install -e .` in its source folder)",
        )
    return ok(f"lockstep {running}")


def packages(facts: Facts) -> CheckResult:
    wrong = [text for name in NEEDED if (text := _complaint(name, facts.installed.get(name)))]
    if wrong:
        needed = " ".join(f'"{name}>={_text(version)}"' for name, version in NEEDED.items())
        return problem("; ".join(wrong), f"{sys.executable} -m pip install {needed}")
    return ok(", ".join(f"{name} {facts.installed[name]}" for name in NEEDED))


def llvmlite(facts: Facts) -> CheckResult:
    installed = facts.installed.get("llvmlite")
    if installed is None or _numbers(installed) < FAST:
        have = "is not installed" if installed is None else f"{installed} is older than {_text(FAST)}"
        return warning(
            f"llvmlite {have}: gradients are added by plain torch operations, which gives the same bits more slowly",
            "pip install 'torch-lockstep[fast]'",
        )
    return ok(f"llvmlite {installed}: additions are compiled")


def extras(facts: Facts) -> CheckResult:
    """Those of EXTRAS that are not installed are named; no run needs them unless it asks for what they are for."""
    missing = {name: use for name, (package, use) in EXTRAS.items() if facts.installed.get(package) is None}
    if not missing:
        return ok(f"{', '.join(EXTRAS)} are installed")
    words = ", ".join(f"{name} ({use})" for name, use in missing.items())
    return ok(f"not installed: {words}. If you want it: pip install 'torch-lockstep[{','.join(missing)}]'")


def saving(facts: Facts) -> CheckResult:
    if facts.saving_error is None:
        return not_known("whether checkpoints can be saved")
    if facts.saving_error:
        return problem(
            f"a checkpoint cannot be saved and loaded: {facts.saving_error}",
            f"{sys.executable} -m lockstep.programs.doctor.checkpoint_trial (shows where it fails)",
        )
    return ok("a checkpoint can be saved and loaded")


def cores(facts: Facts) -> CheckResult:
    usable, quota, worth = facts.usable_cores, facts.core_quota, facts.cores_worth
    if worth is None:
        return not_known("the number of cores")
    if quota is not None and usable is not None and quota < usable:
        have = f"{count(usable, 'core')} in sight, of which the container may use {plain(quota)}"
    else:
        have = f"{plain(worth)} usable"
    workers = count(facts.num_workers, "worker")
    if facts.num_workers > worth:
        return warning(f"{have}; {workers} would take turns", f"lockstep run -n {max(int(worth), 1)} ...")
    return ok(f"{have}, for {workers}")


def threads(facts: Facts) -> CheckResult:
    setting, worth = facts.threads, facts.cores_worth
    if setting is None and facts.architecture in ON_ARM and facts.num_workers > 1:
        unheeded = "on Arm, libraries below torch use all cores in each worker, whatever --threads says"
        return warning(f"OMP_NUM_THREADS is not set: {unheeded}", "export OMP_NUM_THREADS=1")
    if setting is None:
        return ok("OMP_NUM_THREADS is not set: one thread for each worker unless --threads says another")
    first = setting.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return problem(f"OMP_NUM_THREADS={setting} is not a number of threads", "unset OMP_NUM_THREADS")
    total = int(first) * facts.num_workers
    if worth is not None and total > worth and int(first) > 1:
        return warning(
            f"OMP_NUM_THREADS={setting} makes {total} threads on {plain(worth)} cores: they hinder each other",
            "export OMP_NUM_THREADS=1 (the number of threads is part of the result: keep it for a whole run)",
        )
    return ok(f"OMP_NUM_THREADS={setting}, {total} in all")


def memory(facts: Facts) -> CheckResult:
    """See Note [Rough needs]."""
    left, limit = facts.left_bytes, facts.group_limit_bytes
    if left is None:
        return not_known("how much memory is free")
    have = f"{size(left)} free" + (f" (the container is limited to {size(limit)})" if limit is not None else "")
    needed = facts.num_workers * WORKER_BYTES
    if left < needed:
        return problem(
            f"{have}; {count(facts.num_workers, 'worker')} take {size(needed)} before the model is there, "
            "and the kernel kills a worker when memory runs out",
            f"lockstep run -n {max(left // WORKER_BYTES, 1)} ..., end other programs, or raise the container's limit "
            "(docker run --memory)",
        )
    return ok(have)


def shared_memory(facts: Facts) -> CheckResult:
    total, free = facts.shm_bytes, facts.shm_free_bytes
    if total is None or free is None:
        return not_known("the size of /dev/shm")
    have = f"/dev/shm has {size(free)} free of {size(total)}"
    if free >= SHARED_TIGHT_BYTES:
        return ok(have)
    why = "loading processes (DataLoader num_workers) hand over batches there and die of a bus error when it is full"
    larger = total < SHARED_TIGHT_BYTES
    fix = "docker run --shm-size=2g (or: mount -o remount,size=2G /dev/shm)" if larger else "ls -lS /dev/shm | head"
    how_bad = problem if free < SHARED_FULL_BYTES else warning
    return how_bad(f"{have}: {why}", fix)


def memfd(facts: Facts) -> CheckResult:
    if not facts.memfd:
        return problem(
            "the kernel gives no nameless shared memory (memfd_create), over which workers of one host exchange",
            "use Linux 3.17 or newer, and allow memfd_create in the container's seccomp profile "
            "(docker run --security-opt seccomp=unconfined shows whether that is it)",
        )
    return ok("nameless shared memory works")


def open_files(facts: Facts) -> CheckResult:
    """See Note [Rough needs]."""
    soft, hard = facts.open_files_soft, facts.open_files_hard
    if soft is None or hard is None:
        return not_known("the limit on open files")
    needed = FILES + FILES_FOR_EACH_WORKER * facts.num_workers
    raised = f"ulimit -n {max(needed, 65536) if isinf(hard) else int(hard)}"
    if soft >= max(needed, FILES_TIGHT):
        return ok(f"{_limit(soft)} at a time")
    if soft >= needed:
        why = "enough for the workers; loading processes may need one for each tensor that is under way"
        return warning(f"{_limit(soft)} at a time: {why}", raised)
    sentence = f"{_limit(soft)} at a time; {count(facts.num_workers, 'worker')} may need {needed}"
    if hard >= needed:
        return problem(sentence, raised)
    return problem(
        f"{sentence}, and the hard limit is {_limit(hard)}",
        "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536",
    )


def processes(facts: Facts) -> CheckResult:
    """See Note [Rough needs]."""
    left = facts.processes_left
    if left is None:
        return not_known("how many processes may be started")
    needed = WORKER_THREADS * facts.num_workers
    if left < needed:
        return problem(
            f"{max(left, 0):.0f} more processes and threads may be started; "
            f"{count(facts.num_workers, 'worker')} need about {needed}",
            "ulimit -u unlimited, or docker run --pids-limit=-1",
        )
    return ok("as many as wanted" if isinf(left) else f"{left:.0f} more may be started")


def disk(facts: Facts) -> CheckResult:
    folder, free = facts.folder, facts.disk_free_bytes
    if not facts.writable:
        return problem(f"nothing can be written in {folder}, where runs lie", "lockstep run --run-dir DIR ...")
    if free is None:
        return not_known(f"how much is free in {folder}")
    if free < DISK_TIGHT_BYTES:
        how_bad = problem if free < DISK_FULL_BYTES else warning
        sentence = f"{size(free)} free in {folder}: little for logs and checkpoints"
        return how_bad(sentence, f"du -sh {shlex.quote(folder)}/* | sort -h | tail")
    return ok(f"{size(free)} free in {folder}")


def gpus(facts: Facts) -> CheckResult:
    if facts.gpus is None:
        return not_known("whether there are GPUs")
    if not facts.gpus:
        return ok("no GPU: workers compute on the CPU")
    free = facts.gpu_free_bytes
    named = [name + (f" with {size(free[number])} free" if free else "") for number, name in enumerate(facts.gpus)]
    what = f"{count(len(named), 'GPU')}: {', '.join(named)}"
    if facts.torch_cuda is None:
        return warning(
            f"{what}; but this torch was built without CUDA, so workers compute on the CPU",
            "install a torch with CUDA: https://pytorch.org/get-started/locally (or say --device cpu on purpose)",
        )
    mps = "the MPS daemon runs" if facts.mps else "no MPS daemon: workers that share a GPU take turns"
    return ok(f"{what}; torch has CUDA {facts.torch_cuda}; {mps}")


def loopback(facts: Facts) -> CheckResult:
    if facts.loopback_works is None:
        return not_known("whether the loopback interface works")
    if not facts.loopback_works:
        return problem(
            "the loopback interface (127.0.0.1) does not work, over which workers of one host find each other",
            "ip link set lo up",
        )
    return ok("127.0.0.1 answers")


def host_name(facts: Facts) -> CheckResult:
    """docs/doctor.md says where it matters."""
    name = f"the host's name, {facts.host_name},"
    in_hosts = f"echo '<address of this host> {facts.host_name}' >> /etc/hosts"
    if facts.resolving_s is None:
        return warning(f"{name} is not resolved within {facts.waited_s:g} s: Gloo would wait as long", in_hosts)
    if not facts.addresses:
        return warning(f"{name} does not resolve: Gloo fails on several hosts", in_hosts)
    if facts.resolving_s > SLOW_S:
        return warning(f"resolving {name} takes {facts.resolving_s:.1f} s, at every start", in_hosts)
    known = f"{facts.host_name} is {', '.join(facts.addresses)}"
    if all(map(_is_loopback, facts.addresses)) and not facts.gloo_interfaces:
        return ok(f"{known}: right for one host; on several, set GLOO_SOCKET_IFNAME to the interface that joins them")
    return ok(known)


def gloo_interface(facts: Facts) -> CheckResult:
    named, there = facts.gloo_interfaces, facts.interfaces
    if not named:
        return ok("GLOO_SOCKET_IFNAME is not set")
    if there is None:
        return not_known(f"whether GLOO_SOCKET_IFNAME={','.join(named)} names an interface")
    missing = [name for name in named if name not in there]
    if missing:
        return problem(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, and this host has {', '.join(there)}",
            "unset GLOO_SOCKET_IFNAME, or export it with one of those",
        )
    return ok(f"GLOO_SOCKET_IFNAME={','.join(named)} exists")


def orphans(facts: Facts) -> CheckResult:
    left = facts.orphans
    if left is None:
        return not_known("whether workers were left running")
    if not left:
        return ok("no worker runs without its launcher")
    named = "; ".join(f"{orphan.pid} ({orphan.command})" for orphan in left[:3])
    more = f"; {len(left) - 3} more" if len(left) > 3 else ""
    return warning(
        f"{len(left)} process{'' if len(left) == 1 else 'es'} of a run whose launcher is gone: {named}{more}",
        f"kill {' '.join(str(orphan.pid) for orphan in left[:MOST_NAMED])}",
    )


def ended_runs(facts: Facts) -> CheckResult:
    dead = facts.dead_runs
    if dead is None:
        return not_known("which runs still go on")
    if not dead:
        return ok("every run that says it goes on does")
    return warning(
        f"{count(len(dead), 'run')} whose launcher was killed, or runs on another host: {', '.join(dead)}",
        f"go on with `lockstep run --run-dir {shlex.quote(dead[0])} --resume auto ...`, or "
        f"{_remove('rm', [f'{folder}/launcher.json' for folder in dead])}",
    )


def checkpoints(facts: Facts) -> CheckResult:
    partial = facts.partial_checkpoints
    if not partial:
        return ok("no half-written ones")
    return warning(
        f"{count(len(partial), 'half-written checkpoint')} of a writer that was killed (the one before is whole)",
        _remove("rm -r", partial),
    )


def shared_files(facts: Facts) -> CheckResult:
    files = facts.shared_files
    if files is None:
        return not_known("what lies in /dev/shm")
    if not files:
        return ok("no tensors of ended processes in /dev/shm")
    return warning(
        f"{count(len(files), 'file')} of torch in /dev/shm, {size(facts.shared_files_bytes)}, "
        "whose processes have ended",
        _remove("rm", files),
    )


_IN_ORDER: tuple[Callable[[Facts], CheckResult], ...] = (
    python, lockstep, packages, llvmlite, extras, saving, cores, threads, memory, shared_memory, memfd, open_files,
    processes, disk, gpus, loopback, host_name, gloo_interface, orphans, ended_runs, checkpoints, shared_files,
)  # fmt: skip
CHECKS = {check.__name__.replace("_", " "): check for check in _IN_ORDER}
"""By the name under which each is shown."""


def diagnose(facts: Facts) -> Diagnosis:
    return Diagnosis(facts.num_workers, facts.running, {name: check(facts) for name, check in CHECKS.items()})


def _complaint(name: str, installed: str | None) -> str:
    if installed is None:
        return f"{name} is not installed"
    if _numbers(installed) < NEEDED[name]:
        return f"{name} {installed} is too old, lockstep needs {_text(NEEDED[name])}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu is (2, 13, 0). A version that does not begin with numbers counts as new."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (sys.maxsize,)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _limit(number: float) -> str:
    return "no limit" if isinf(number) else plain(number)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _remove(command: str, paths: Iterable[str]) -> str:
    return f"{command} {' '.join(shlex.quote(path) for path in list(paths)[:MOST_NAMED])}"
