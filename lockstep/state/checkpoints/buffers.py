"""Memory into which snapshots are copied, used again every time: what is written is not what training changes."""

import torch

from lockstep.state.checkpoints.file import Snapshot


class Buffers:
    """Copies on the CPU, one for each name. They belong to one snapshot at a time: the last one copied."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copied(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in this memory. Nothing is allocated for a name that has the size and dtype of before."""
        self._copies = {name: self._place_for(name, tensor) for name, tensor in snapshot.tensors.items()}
        for name, tensor in snapshot.tensors.items():
            self._copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in snapshot.tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return Snapshot(dict(self._copies), snapshot.state)

    def _place_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._copies.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        # A GPU copies into pinned memory at the full speed of its link.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
