"""Every optimizer whose state can be divided has the same bits on a GPU, divided or not."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

Launched = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).parent / "optimizers_on_gpu.py"


def digests(launched: Launched, num_workers: int, strategy: str) -> dict[str, str]:
    """Those that worker 0 printed; the run itself compares the workers at every second step."""
    done = launched(num_workers, SCRIPT, strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drifted" not in done.stdout + done.stderr
    (found,) = re.findall(r"\{.*\}", done.stdout)
    return dict(json.loads(found))


def test_every_optimizer_has_the_digest_of_replicated_on_a_gpu(launched: Launched) -> None:
    want, found = digests(launched, 1, "replicated"), digests(launched, 3, "sharded:gradients")
    assert len(want) > 10
    assert {name: digest for name, digest in found.items() if digest != want[name]} == {}
