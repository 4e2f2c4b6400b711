"""Where NVIDIA's cuda-bindings are missing, workers that share GPU memory learn which extra to install."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.errors import BadEnvironment
from lockstep.wire.cuda import driver

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which nobody has installed them."""
    driver._bindings.cache_clear()
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    "call",
    [lambda: driver.launch(None, 1, 1, 0, []), lambda: driver._bindings("nvrtc")],
    ids=["driver", "compiler"],
)
def test_a_missing_package_is_named_with_what_to_install_and_what_to_write_instead(without_bindings, call) -> None:
    with pytest.raises(BadEnvironment) as refused:
        call()
    said = str(refused.value)
    assert said.startswith("workers that share GPU memory need NVIDIA's cuda-bindings")
    assert 'wire="nccl" or device="cpu"' in said
    (extra,) = re.findall(r'pip install "torch-lockstep\[(\w+)\]"', said)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("cuda-bindings") for requirement in extras[extra])


def test_it_is_looked_for_again_when_it_was_missing(without_bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadEnvironment):
        driver._bindings("driver")
    installed = type(sys)("cuda.bindings.driver")
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", installed)
    assert driver._bindings("driver") is installed
    driver._bindings.cache_clear()
