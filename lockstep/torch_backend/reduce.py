"""Collectives that combine numbers: all-reduce, of sparse tensors too, reduce, reduce-scatter.

# Note [Bytes moved in an all-reduce]
# Each member combines one slice over all members. The plain way in shared memory copies a tensor of P bytes in,
# combines, writes each result to all W members and copies out: every member reads 3·P and writes 3·P bytes. Here a
# member copies in only the slices that others combine, takes its own slice where the caller has it, writes the result
# there and once more into its own staging memory, and copies the other slices straight from the staging memory of the
# members that combined them: (3 - 2/W)·P bytes read and 2·P written. With two members that is a third less of both.
#
# A tensor is cut into chunks that fit a cache, so that only the first reading and the last writing go to memory. A
# round takes the results of one chunk and the inputs of the next together: one meeting for each chunk, and one more.
#
# A small tensor is not worth the second meeting: every member combines all of it, in the same brackets, to the same
# bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.torch_backend.call import CollectiveCall, dtype_name, exchange_call, reduction_name
from lockstep.torch_backend.exchange import CHUNK_BYTES, exchange
from lockstep.torch_backend.flat import each, whole
from lockstep.torch_backend.reductions import combination
from lockstep.torch_backend.rounds import Agreed, Rounds, agree
from lockstep.wire.schedules import slices
from lockstep.wire.shared.board import Meeting
from lockstep.wire.shared.kernels import Work
from lockstep.wire.shared.reducer import SPIN_BYTES

AT_ONCE_BYTES = 32 * 1024
"""Up to this size every member combines everything."""

_LINE_BYTES = 64


def all_reduce(rounds: Rounds, call: CollectiveCall, elements: torch.Tensor, *, keeps: bool = True) -> None:
    """Collective. Afterwards the flat `elements` are the reduction over all members, on those that keep it.

    See Note [Bytes moved in an all-reduce].
    """
    if elements.nbytes <= AT_ONCE_BYTES:
        _at_once(rounds, call, elements, keeps)
    else:
        _in_chunks(_Sliced(rounds, call, elements, keeps))


def _at_once(rounds: Rounds, call: CollectiveCall, elements: torch.Tensor, keeps: bool) -> None:
    _typed(rounds.staging(elements.nbytes), 0, elements).copy_(elements)
    meeting, agreed = agree(rounds, call, spin=True)
    if keeps:
        work, total = _prepared(rounds, meeting, agreed, elements)
        work()
        elements.copy_(total)


def _prepared(rounds: Rounds, meeting: Meeting, agreed: Agreed, like: torch.Tensor) -> tuple[Work, torch.Tensor]:
    """The additions, and the place of their result; made once for the same call and the same staging memory."""
    if agreed.work is None or agreed.total is None:
        agreed.total = torch.empty_like(like)
        values = [_typed(meeting.memory[member][0], 0, like) for member in rounds.members]
        agreed.work = combination(agreed.calls[rounds.rank].reduction, values, [agreed.total])
    return agreed.work, agreed.total


@dataclass(frozen=True)
class _Sliced:
    """An all-reduce in chunks. Staging memory holds this member's result of one chunk, then its inputs of the next."""

    rounds: Rounds
    call: CollectiveCall
    elements: torch.Tensor
    keeps: bool

    @property
    def chunks(self) -> list[torch.Tensor]:
        return list(self.elements.split(CHUNK_BYTES // self.elements.element_size()))

    @property
    def inputs_at(self) -> int:
        """Where the inputs begin: after the longest slice."""
        longest = -(-CHUNK_BYTES // len(self.rounds.members))
        return _aligned(min(longest, self.elements.nbytes) + self.elements.element_size())

    def staging(self) -> torch.Tensor:
        return self.rounds.staging(self.inputs_at + min(CHUNK_BYTES, self.elements.nbytes))

    def copy_in(self, chunk: torch.Tensor, staging: torch.Tensor) -> None:
        inputs = _typed(staging, self.inputs_at, chunk)
        for member, part in enumerate(slices(chunk.numel(), len(self.rounds.members))):
            if member != self.rounds.rank:
                inputs[part.start : part.stop].copy_(chunk[part.start : part.stop])

    def combine(self, meeting: Meeting, chunk: torch.Tensor, staging: torch.Tensor) -> None:
        """Combines this member's slice, into the staging memory of the next round."""
        rank, members = self.rounds.rank, self.rounds.members
        part = slices(chunk.numel(), len(members))[rank]
        own = chunk[part.start : part.stop]
        inputs = [own if m == rank else self._input(meeting, m, chunk)[part.start : part.stop] for m in members]
        result = _typed(staging, 0, own)
        combination(self.call.reduction, inputs, [own, result] if self.keeps else [result])()

    def copy_out(self, meeting: Meeting, chunk: torch.Tensor) -> None:
        for member, part in enumerate(slices(chunk.numel(), len(self.rounds.members))):
            if member != self.rounds.rank:
                place = chunk[part.start : part.stop]
                place.copy_(_typed(meeting.memory[member][0], 0, place))

    def _input(self, meeting: Meeting, member: int, chunk: torch.Tensor) -> torch.Tensor:
        return _typed(meeting.memory[member][0], self.inputs_at, chunk)


def _in_chunks(sliced: _Sliced) -> None:
    """One round for each chunk and one more: round k brings the results of chunk k-1 and the inputs of chunk k."""
    chunks = sliced.chunks
    meeting: Meeting | None = None
    for index in range(len(chunks) + 1):
        staging = sliced.staging()
        if meeting is not None:
            sliced.combine(meeting, chunks[index - 1], staging)
        if index < len(chunks):
            sliced.copy_in(chunks[index], staging)
        spin = sliced.elements.nbytes <= SPIN_BYTES
        if meeting is None:
            meeting, _ = agree(sliced.rounds, sliced.call, spin=spin)
            continue
        meeting = sliced.rounds.meet(spin=spin)
        if sliced.keeps:
            sliced.copy_out(meeting, chunks[index - 1])


def reduce_scatter(rounds: Rounds, call: CollectiveCall, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Collective. Afterwards `out` is the reduction of all members' parts for this one. One copy, of peers' parts."""
    itemsize, rank = out.element_size(), rounds.rank
    longest = max(part.numel() for part in parts)
    step = max(1, min(longest, CHUNK_BYTES // len(parts) // itemsize))
    slot = _aligned(step * itemsize)
    spin = sum(part.nbytes for part in parts) <= SPIN_BYTES
    for start in range(0, max(1, longest), step):
        staging = rounds.staging(slot * len(parts))
        for member, part in enumerate(parts):
            if member != rank:
                piece = part[start : start + step]
                _typed(staging, member * slot, piece).copy_(piece)
        meeting = agree(rounds, call, spin=spin)[0] if start == 0 else rounds.meet(spin=spin)
        own, place = parts[rank][start : start + step], out[start : start + step]
        values = [own if m == rank else _typed(meeting.memory[m][0], rank * slot, own) for m in rounds.members]
        combination(call.reduction, values, [place])()


def _typed(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes from `start` on as a tensor of the same dtype and length as another."""
    return memory[start : start + like.nbytes].view(like.dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


# -- sparse tensors ----------------------------------------------------------------------------------------------


def sparse_call(tensor: torch.Tensor, op: object) -> CollectiveCall:
    """Named apart from that of dense tensors, so that one meeting the other is a disagreement."""
    name = reduction_name(op)
    fault = "" if tensor.layout == torch.sparse_coo and tensor.is_cpu else f"{tensor.layout} on {tensor.device}"
    if name != "SUM":
        fault = f"{name} is not defined for sparse tensors; SUM is"
    sizes = (*tensor.shape, tensor.sparse_dim())
    return CollectiveCall("all_reduce of sparse tensors", (dtype_name(tensor.dtype),), sizes, name, fault=fault)


def sparse_all_reduce(rounds: Rounds, call: CollectiveCall, tensor: torch.Tensor) -> None:
    """Collective. Afterwards the tensor is the sum over all members. Three meetings: the call, the sizes, the data.

    Every member gets all indices and values, and adds them up itself, to the same bits.
    """
    agree(rounds, call)
    mine = tensor.detach().coalesce()
    count = torch.tensor([mine._nnz()], device="cpu")
    counts = _gathered(rounds, [count], [[torch.empty_like(count) for _ in rounds.members]])[0]
    lengths = [int(length) for length in counts]
    indices, values = mine.indices().t().contiguous(), mine.values()
    places = [[part.new_empty((n, *part.shape[1:])) for n in lengths] for part in (indices, values)]
    all_indices, all_values = _gathered(rounds, [indices, values], places)
    # The tensor takes over new memory, which must be of its own mode. See Note [Tensors of inference mode].
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        total = torch.sparse_coo_tensor(torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape, device="cpu")
        tensor.copy_(total.coalesce())


def _gathered(
    rounds: Rounds, tensors: list[torch.Tensor], places: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    given = [whole(tensor, [True] * len(rounds.members)) for tensor in tensors]
    taken = [each(tensors_of_one) for tensors_of_one in places]
    exchange(rounds, exchange_call("all_gather", given, taken), given, taken)
    return places
