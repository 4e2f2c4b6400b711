"""Tensors where peers can see them: in place if they were made here, else copied into memory kept for that."""

from collections.abc import Sequence

import torch

from lockstep.wire.shared.memory import HostMemory


class Staging:
    """Typed tensors in the shared memory of this worker, and room for those that are not."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._kept: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor that needs no copy. Any thread."""
        if device.type != "cpu" or num_elements == 0:
            return torch.empty(num_elements, dtype=dtype, device=device)
        return self._memory.allocate(num_elements * dtype.itemsize).view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        self._memory.release(tensor)

    def shared(self, tensor: torch.Tensor, slot: int, *, filled: bool) -> torch.Tensor:
        """The tensor itself if peers can see it, else its place in shared memory, `filled` with a copy or not."""
        if self._memory.number_of(tensor) is not None:
            return tensor
        kept = self._kept.get((tensor.dtype, slot))
        if kept is None or kept.numel() < tensor.numel():
            if kept is not None:
                self.release(kept)
            kept = self._kept[tensor.dtype, slot] = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        staged = kept[: tensor.numel()]
        return staged.copy_(tensor) if filled else staged

    def roots_and_place(
        self, roots: Sequence[torch.Tensor], total: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The roots where peers can see them, and the place there for their sum, which may be the first root's."""
        shared = [self.shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        in_place = bool(roots) and roots[0] is total
        return shared, shared[0] if in_place else self.shared(total, len(roots), filled=False)
