"""What workers load and compile, loaded and compiled once, in the process that they are forked from."""

import encodings.idna  # noqa: F401 - of addresses

import torch
import torch._inductor.config  # loaded by start and by optimizers
from torch import nn

import lockstep.run.start  # noqa: F401
from lockstep.determinism.onednn import OneDnnSwitch
from lockstep.lanes import Assignment, Root, leaves, reduction
from lockstep.wire.shared.kernels import summation

torch.set_num_threads(1)  # a forked process must not inherit a pool of threads that do not exist in it


def _make_a_step() -> None:
    """The first backward pass and the first update of a process cost it more than the others."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def _compile_sums(num_workers: int, num_lanes: int) -> None:
    tree = reduction(Assignment.even(num_lanes, num_workers), tuple(range(num_lanes))).tree
    values = {leaf: torch.zeros(1) for leaf in leaves(tree) if isinstance(leaf, Root)}
    summation(tree, values, [torch.zeros(1) for _ in range(num_workers)])


_make_a_step()
OneDnnSwitch(exact=True, device=torch.device("cpu"))  # a first product in bfloat16
for num_workers, num_lanes in ((2, 2), (2, 6), (3, 3), (3, 6), (3, 8), (4, 4)):
    _compile_sums(num_workers, num_lanes)
