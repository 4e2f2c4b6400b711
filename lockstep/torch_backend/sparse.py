"""The sum of sparse tensors: everybody gets all indices and values, and adds them up itself, to the same bits."""

import torch

from lockstep.torch_backend.agreement import agree
from lockstep.torch_backend.arguments import dtype_name, exchange_call, reduction_name
from lockstep.torch_backend.call import CollectiveCall
from lockstep.torch_backend.exchange import exchange
from lockstep.torch_backend.flat import each, whole
from lockstep.torch_backend.rounds import Rounds


def sparse_call(tensor: torch.Tensor, op: object) -> CollectiveCall:
    """Named apart from that of dense tensors, so that one meeting the other is a disagreement."""
    name = reduction_name(op)
    fault = "" if tensor.layout == torch.sparse_coo and tensor.is_cpu else f"{tensor.layout} on {tensor.device}"
    if name != "SUM":
        fault = f"{name} is not defined for sparse tensors; SUM is"
    sizes = (*tensor.shape, tensor.sparse_dim())
    return CollectiveCall("all_reduce of sparse tensors", (dtype_name(tensor.dtype),), sizes, name, fault=fault)


def sparse_all_reduce(rounds: Rounds, call: CollectiveCall, tensor: torch.Tensor) -> None:
    """Collective. The tensor is the sum over all members. Three meetings: what is asked for, how much comes, and it."""
    agree(rounds, call)
    mine = tensor.detach().coalesce()
    count = torch.tensor([mine._nnz()], device="cpu")
    counts = _gathered(rounds, [count], [[torch.empty_like(count) for _ in rounds.members]])[0]
    lengths = [int(found) for found in counts]
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
    taken = [each(found) for found in places]
    exchange(rounds, exchange_call("all_gather", given, taken), given, taken)
    return places
