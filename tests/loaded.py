"""What workers load and compile, loaded and compiled once, in the process that they are forked from."""

import encodings.idna  # noqa: F401 - of addresses

import torch
import torch._inductor.config  # loaded by start and by optimizers
import torch.nn.functional as F
from torch import nn

import lockstep.run.start  # noqa: F401
from lockstep.determinism.onednn import OneDnnSwitch
from lockstep.lanes import Assignment, Root, leaves, reduction
from lockstep.wire.shared.kernels import summation

torch.set_num_threads(1)  # a forked process must not inherit a pool of threads that do not exist in it


def _make_a_step() -> None:
    """The first backward pass of a kind of layer, and the first update, cost a process more than the others."""
    with torch.random.fork_rng(devices=[]):
        convolution = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1))
        attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        for size in (6, 7):  # lanes of the models in training.py
            out = attention(torch.ones(size, 12, 16), src_mask=torch.full((12, 12), float("-inf")).triu(1))
            F.cross_entropy(out[:, -1, :5], torch.zeros(size, dtype=torch.long)).backward()
            F.relu(convolution(torch.ones(size, 3, 4, 4))).mean((2, 3)).sum().backward()
    torch.optim.AdamW(convolution.parameters()).step()


def _compile_sums(num_workers: int, num_lanes: int) -> None:
    tree = reduction(Assignment.even(num_lanes, num_workers), tuple(range(num_lanes))).tree
    values = {leaf: torch.zeros(1) for leaf in leaves(tree) if isinstance(leaf, Root)}
    summation(tree, values, [torch.zeros(1) for _ in range(num_workers)])


_make_a_step()
OneDnnSwitch(exact=True, device=torch.device("cpu"))  # a first product in bfloat16
for num_workers, num_lanes in ((2, 2), (2, 6), (3, 3), (3, 6), (3, 8), (4, 4)):
    _compile_sums(num_workers, num_lanes)
