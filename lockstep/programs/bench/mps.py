"""NVIDIA's Multi-Process Service for as long as a benchmark runs: kernels of several processes share a GPU.

Without it a GPU gives each process all of itself in turn, slice of time by slice of time.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import BadEnvironment
from lockstep.settings.environment import process_environment

CONTROL = "nvidia-cuda-mps-control"
ANSWER_S = 30.0


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[dict[str, str]]:
    """Gives the variables by which a process finds the service, none if it is not `wanted`. It is gone afterwards."""
    if not wanted:
        yield {}
        return
    program = _find(CONTROL)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-mps-"))
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    try:
        for path in variables.values():
            Path(path).mkdir()
        _start(program, variables)
        try:
            yield variables
        finally:
            _quit(program, variables)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find(name: str) -> str:
    program = shutil.which(name, path=process_environment().get("PATH"))
    if program is None:
        raise BadEnvironment(
            f"--mps needs the program {name}, which comes with NVIDIA's driver and was not found: "
            "add its folder to PATH, or leave --mps out"
        )
    return program


def _start(program: str, variables: Mapping[str, str]) -> None:
    """The daemon runs, and its server will start with the first process that comes."""
    done = _control([program, "-d"], variables, "")
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
        raise BadEnvironment(f"{CONTROL} did not start: {said}. Leave --mps out, or end the service that runs already")


def _quit(program: str, variables: Mapping[str, str]) -> None:
    """Waits for the processes that still use the service, which are ending."""
    _control([program], variables, "quit\n")


def _control(command: list[str], variables: Mapping[str, str], told: str) -> "subprocess.CompletedProcess[str]":
    environment = {**process_environment(), **variables}
    with tempfile.TemporaryFile("w+") as output:  # a daemon keeps its output open, and a pipe would wait for its end
        done = subprocess.run(
            command, env=environment, input=told, stdout=output, stderr=output, text=True, timeout=ANSWER_S, check=False
        )
        output.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read(), "")
