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
def multi_process_service(enabled: bool) -> Iterator[dict[str, str]]:
    """Yields the variables by which a process finds the service, none if it is not `enabled`. Ends it afterwards."""
    if not enabled:
        yield {}
        return
    program = shutil.which(CONTROL, path=process_environment().get("PATH"))
    if program is None:
        raise BadEnvironment(
            f"--mps needs the program {CONTROL}, which comes with NVIDIA's driver and was not found: "
            "add its folder to PATH, or leave --mps out"
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-mps-", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            Path(path).mkdir()
        if failure := _control([program, "-d"], variables, ""):  # its server starts with the first process
            advice = "Leave --mps out, or end the service that runs already"
            raise BadEnvironment(f"{CONTROL} did not start: {failure}. {advice}")
        try:
            yield variables
        finally:
            _control([program], variables, "quit\n")  # waits for the processes that still use it, which are ending


def _control(command: list[str], variables: Mapping[str, str], words: str) -> str | None:
    """None if the command succeeds, otherwise what it printed, or its exit code."""
    environment = {**process_environment(), **variables}
    with tempfile.TemporaryFile("w+") as output:  # a daemon keeps its output open, and a pipe would wait for its end
        done = subprocess.run(
            command, env=environment, input=words, stdout=output, stderr=output, text=True, timeout=ANSWER_S
        )  # fmt: skip
        output.seek(0)
        return output.read().strip() or f"exit code {done.returncode}" if done.returncode else None
