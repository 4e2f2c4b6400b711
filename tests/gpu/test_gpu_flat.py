"""Flat updates on a real GPU: the bits of the fused update of separate parameters."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

Launched = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).parent / "flat_on_gpu.py"


def told(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_flat_update_gives_the_bits_of_the_fused_one(launched: Launched) -> None:
    digests = told(launched(1, SCRIPT))
    assert len(digests) == 18
    assert {kind: flat for kind, (flat, _) in digests.items()} == {kind: plain for kind, (_, plain) in digests.items()}


def test_flat_updates_give_the_same_bits_on_one_worker_and_on_two(launched: Launched) -> None:
    assert told(launched(2, SCRIPT, "adamw")) == told(launched(1, SCRIPT, "adamw"))
