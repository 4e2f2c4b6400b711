"""The library of CPU kernels that torch turns off by itself on some machines.

# Note [Turned off by a product]
# Where a CPU has no instructions for bfloat16 (Arm's Neoverse N1), oneDNN refuses such a product. torch then takes
# another library, and turns oneDNN off for all that the process computes from then on: float32 products have other
# bits. What a lane computes must not depend on what its worker has computed before. So each lane begins with oneDNN
# on, and so does what follows the lanes of a step.
"""

import warnings

import torch

_EDGE = 32
"""Of square matrices that are large enough for oneDNN."""


class OneDnnSwitch:
    """`torch.backends.mkldnn.enabled` in one run. Where torch never turns it off by itself, it is left alone."""

    def __init__(self, exact: bool, device: torch.device) -> None:
        self._must_reset = exact and device.type == "cpu" and _is_on() and _product_turns_it_off()

    def reset(self) -> None:
        """Turns oneDNN on, if it was on when the run began and torch turns it off. See Note [Turned off by a product].

        The next bfloat16 product then fails in oneDNN once more. That takes 6 ms on a Neoverse N1, where a product of
        64 x 512 x 512 takes 270.
        """
        if self._must_reset:
            _turn_on()


def _product_turns_it_off() -> bool:
    one = torch.ones(_EDGE, _EDGE, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so with a trace of its calls
        torch.nn.functional.linear(one, one)
    is_off = not _is_on()
    if is_off:
        _turn_on()
    return is_off


def _is_on() -> bool:
    return bool(torch.backends.mkldnn.enabled)


def _turn_on() -> None:
    torch._C._set_mkldnn_enabled(True)
