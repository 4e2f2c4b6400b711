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


def digests(launched: Launched, num_workers: int, strategy: str) -> list[dict[str, str]]:
    """Those that each worker printed."""
    done = launched(num_workers, SCRIPT, strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(found) for found in re.findall(r"\{.*\}", done.stdout)]


def test_every_optimizer_has_the_digest_of_replicated_on_a_gpu(launched: Launched) -> None:
    (want,) = digests(launched, 1, "replicated")
    found = digests(launched, 3, "sharded:optimizer")
    assert len(found) == 3
    for other in found:
        assert {name: digest for name, digest in other.items() if digest != want[name]} == {}
