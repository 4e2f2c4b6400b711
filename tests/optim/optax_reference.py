"""What optax makes of the cases, in float64.

jax does not survive a fork, and the tests fork: so optax runs in a process of its own, which is this file as a script:

    python optax_reference.py answers.npz
"""

import functools
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optax_cases import CASES, NUM_STEPS, Array, gradients, start

needs_optax = pytest.mark.skipif(
    importlib.util.find_spec("optax") is None, reason="optax is not installed (pip install optax)"
)


def optax_says(case: str) -> list[Array]:
    """The parameters after the steps of the case."""
    return [array for name, array in _answers().items() if name.rpartition("/")[0] == case]


@functools.cache
def _answers() -> dict[str, Array]:
    """Those of all cases: loading jax takes seconds, so one process answers for all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers.npz")
        subprocess.run([sys.executable, __file__, str(path)], check=True)
        with np.load(path) as found:
            return dict(found)


def _after_steps(name: str, options: dict[str, Any]) -> list[Array]:
    import jax
    import optax

    transform = getattr(optax, name)(**options)

    def step(carried: Any, grads: Any) -> Any:
        params, state = carried
        updates, state = transform.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = [jax.numpy.asarray(w) for w in start(0)]
    each = [jax.numpy.stack(one) for one in zip(*gradients(0, NUM_STEPS), strict=True)]
    (params, _), _ = jax.lax.scan(step, (params, transform.init(params)), each)
    return [np.asarray(param) for param in params]


def _answer(path: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than the steps
    answers = {f"{case}/{i}": w for case, asked in CASES.items() for i, w in enumerate(_after_steps(*asked))}
    np.savez(path, **answers)  # type: ignore[arg-type]


if __name__ == "__main__":
    _answer(sys.argv[1])
