"""Where a benchmark can compute, and what only makes sense there. Loads torch only where it says so."""

from collections.abc import Sequence

from lockstep.errors import BadArgument

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)


def refuse_unless_gpu(device: str, **given: bool) -> None:
    """Raises if an option that is only for a GPU was given for another device."""
    odd = [f"--{name}" for name, is_given in given.items() if is_given]
    if device != CUDA and odd:
        raise BadArgument(f"{' and '.join(odd)} is for a GPU alone: add --device cuda, or leave it out")


def require_gpu() -> None:
    """Raises if torch finds no GPU, with the reason. Loads torch."""
    from lockstep.settings.device import choose, count_gpus

    choose(CUDA, 0, 1, count_gpus())


def refuse_unless_on(device: str, models: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises if a model is not measured on the device."""
    odd = [model for model in models if model not in allowed]
    if odd:
        raise BadArgument(
            f"the model {odd[0]} is not measured with --device {device}: choose from {', '.join(allowed)}, "
            "or another --device"
        )
