"""oneDNN is on when a lane begins, whatever its worker has computed before."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers

import lockstep
from lockstep.determinism import onednn
from lockstep.determinism.onednn import OneDnnSwitch

CPU = torch.device("cpu")
needs_a_cpu_without_bfloat16 = pytest.mark.skipif(
    not OneDnnSwitch(True, CPU)._must_reset, reason="this CPU has bfloat16, or torch does not turn oneDNN off on it"
)


class InTwoTypes(nn.Module):
    """A float32 product, then one of bfloat16, which torch does without oneDNN on some CPUs, and so all that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return linear(hidden.bfloat16(), self.second.weight.bfloat16()).float() + self.second.bias


def _train(before: bool) -> str:
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(384, 128, generator=generator), torch.randn(384, 32, generator=generator))
    with lockstep.start(lanes=3, drift_every=1) as run:
        model = InTwoTypes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.replicate(model, optimizer)
        if before and run.rank == 0:
            model(dataset[:64][0])
        for batch in run.shard(DataLoader(dataset, 192, shuffle=True)):
            for x, y in run.lanes(batch):
                (model(x) - y).square().mean().backward()
            optimizer.step()
        return run.digest()


@needs_a_cpu_without_bfloat16
def test_a_lane_has_the_same_bits_after_a_bfloat16_product_as_before_one() -> None:
    runs = [on_workers(workers, _train, before) for workers in (1, 2, 3) for before in (False, True)]
    assert len({digest for run in runs for digest in run}) == 1


def _switch_in_lanes() -> list[bool]:
    dataset = TensorDataset(torch.arange(8.0))
    found = []
    onednn._product_turns_it_off = lambda: True
    with lockstep.start(lanes=2) as run:
        model = run.replicate(nn.Linear(1, 1))
        for batch in run.shard(DataLoader(dataset, 4)):
            for (x,) in run.lanes(batch):
                found.append(torch.backends.mkldnn.enabled)
                model(x[:, None]).mean().backward()
                torch._C._set_mkldnn_enabled(False)  # as torch does
            found.append(torch.backends.mkldnn.enabled)
            torch._C._set_mkldnn_enabled(False)
    return found


def test_the_switch_is_on_in_each_lane_and_after_the_last() -> None:
    assert on_workers(1, _switch_in_lanes) == [[True] * 6]


@pytest.mark.parametrize(
    ("exact", "device", "is_on"), [(False, "cpu", True), (True, "cuda", True), (True, "cpu", False)]
)
def test_what_is_not_exact_or_was_off_is_left_alone(
    exact: bool, device: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_product_turns_it_off", lambda: True)
    torch._C._set_mkldnn_enabled(is_on)
    switch = OneDnnSwitch(exact, torch.device(device))
    torch._C._set_mkldnn_enabled(False)
    switch.reset()
    assert not torch.backends.mkldnn.enabled


def test_the_probe_leaves_the_switch_on() -> None:
    OneDnnSwitch(True, CPU)
    assert torch.backends.mkldnn.enabled
