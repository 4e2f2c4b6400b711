"""`import lockstep` is enough, before torch or after it; and a script may just end."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

LOCKSTEP_FIRST = "import sys, lockstep\nassert 'torch' not in sys.modules\nimport torch.distributed as dist\n"
TORCH_FIRST = "import torch.distributed as dist\nimport lockstep\n"
REST = """
import sys, torch
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("lockstep", store=dist.FileStore(file, 2), rank=rank, world_size=2)
dist.all_reduce(value := torch.ones(3), async_op=True).wait()
print(value.tolist(), flush=True)
left = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    """Two processes that import in different orders and end without destroying their group; one is in an operation."""
    store = str(tmp_path_factory.mktemp("store") / "file")
    scripts = [LOCKSTEP_FIRST + REST, TORCH_FIRST + REST]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), store],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, script in enumerate(scripts)
    ]
    result = [process.communicate(timeout=60) for process in processes]
    return [
        subprocess.CompletedProcess([], process.returncode, *texts)
        for process, texts in zip(processes, result, strict=True)
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_backend_is_there_whichever_is_imported_first(ended, rank: int) -> None:
    assert ended[rank].stdout == "[2.0, 2.0, 2.0]\n"


def test_a_process_ends_quietly_without_destroying_its_group_even_inside_an_operation(ended) -> None:
    assert [(process.returncode, process.stderr) for process in ended] == [(0, ""), (0, "")]


def test_a_torch_without_distributed_can_be_imported_beside_lockstep() -> None:
    script = (
        "import sys, lockstep, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "sys.modules['torch.distributed'] = types.ModuleType('torch.distributed')\n"
        "import torch.distributed\n"
        "print(lockstep.__version__ != '')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
