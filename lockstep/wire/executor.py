"""The reducer that sends: carries out a schedule over a transport."""

from collections.abc import Sequence

import torch

from lockstep.lanes import Branch, Reduction, Root, Tree
from lockstep.wire.algorithms import Round, Send, direct, slices
from lockstep.wire.transport import DATA, Pending, Transport


class Executor:
    """A Reducer over any transport, by direct slices. Keeps the memory for what it receives."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rank = transport.world.rank
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=device)

    def release(self, tensor: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        self._scratch.clear()

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        schedule = direct(reduction)
        parts = slices(total.numel(), schedule.num_workers)
        for moves in schedule.at(self._rank):
            arrived = self._exchange(moves, roots, total, parts)
            for add in moves.adds:
                span = parts[add.part]
                own = {Root(self._rank, index): _cut(root, span) for index, root in enumerate(roots)}
                _add_into(_cut(total, span), add.tree, own | arrived)

    def _exchange(
        self, moves: Round, roots: Sequence[torch.Tensor], total: torch.Tensor, parts: Sequence[range]
    ) -> dict[Root, torch.Tensor]:
        """Sends and receives what one round asks for; gives the roots of others that have arrived."""
        incoming = [send for send in moves.sends if send.target == self._rank]
        places = self._places(incoming, total, parts)
        pending: list[Pending] = [
            self._transport.receive(place, send.source, DATA) for send, place in zip(incoming, places, strict=True)
        ]
        for send in moves.sends:
            if send.source == self._rank:
                value = total if send.root is None else roots[send.root.index]
                pending.append(self._transport.send(_cut(value, parts[send.part]), send.target, DATA))
        for transfer in pending:
            transfer.wait()
        return {send.root: place for send, place in zip(incoming, places, strict=True) if send.root}

    def _places(self, incoming: Sequence[Send], total: torch.Tensor, parts: Sequence[range]) -> list[torch.Tensor]:
        """Where each message lands: slices of the sum in `total` itself, roots of others in scratch memory."""
        needed = sum(len(parts[send.part]) for send in incoming if send.root)
        scratch = self._scratch_of(needed, total.dtype, total.device)
        places, used = [], 0
        for send in incoming:
            if send.root is None:
                places.append(_cut(total, parts[send.part]))
            else:
                places.append(scratch[used : used + len(parts[send.part])])
                used += len(parts[send.part])
        return places

    def _scratch_of(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kept = self._scratch.get(dtype)
        if kept is None or kept.numel() < num_elements:
            kept = self._scratch[dtype] = torch.empty(num_elements, dtype=dtype, device=device)
        return kept


def _cut(flat: torch.Tensor, span: range) -> torch.Tensor:
    return flat[span.start : span.stop]


def _add_into(place: torch.Tensor, tree: Tree, values: dict[Root, torch.Tensor]) -> None:
    """Writes the sum to `place`, which may be one of the values. Uses the values up."""

    if isinstance(tree, Branch):
        left = _value(tree.left, values)
        torch.add(left, _value(tree.right, values), out=place)
    elif (only := _value(tree, values)).data_ptr() != place.data_ptr():
        place.copy_(only)


def _value(tree: Tree, values: dict[Root, torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, Branch):
        left = _value(tree.left, values)
        return left.add_(_value(tree.right, values))
    assert isinstance(tree, Root)
    return values[tree]
