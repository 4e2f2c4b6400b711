"""The process group that torch.distributed calls: in shared memory on one host, by Gloo between hosts.

# Note [A process group in Python]
# C++ code (DDP's reducer, the functional collectives) reaches a subclass in Python through the names that torch's
# PyProcessGroup passes on: allreduce, allgather, broadcast, reduce_scatter, barrier, the coalesced ones and
# all_to_all_single. torch 2.12 renamed some; both names are here. All else goes to the backend that is registered for
# the device: a Gloo group, which connects when first used. It gives the group its name and its device, and serves what
# C++ may call under other names, so that nothing is silently left out.
"""

# mypy: disable-error-code="override, assignment"
# torch declares every method with several signatures and calls one.

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from lockstep.torch_backend import reduce as reduction
from lockstep.torch_backend.call import CollectiveCall, exchange_call, reduction_call, split_sizes, unwritable
from lockstep.torch_backend.exchange import exchange
from lockstep.torch_backend.flat import MemberParts, cut, each, flat, nothing, row, whole
from lockstep.torch_backend.members import Members, open_members
from lockstep.torch_backend.messages import MessageWork, check_message
from lockstep.torch_backend.reduce import sparse_all_reduce, sparse_call
from lockstep.torch_backend.rounds import agree
from lockstep.torch_backend.work import Operation
from lockstep.wire.network.hosts import find_hosts
from lockstep.wire.shared import semaphores
from lockstep.wire.transport import Hosts

Tensor = torch.Tensor
Program = Callable[[], None]

MAX_SIZES = 2048
"""How many sizes fit into one call's words; more tensors than that go in several calls."""


class SharedMemoryGroup(ProcessGroup):  # type: ignore[misc]
    """Collectives of processes on one host. See Note [A process group in Python].

    An operation that its caller waits for at once runs in the caller's thread, all others on one of the group's own.
    """

    def __init__(self, members: Members, gloo: Any, store: Store) -> None:
        super().__init__(members.rank, members.size)  # type: ignore[call-arg]  # the one for subclasses
        self._members = members
        self._store = store
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, gloo)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "lockstep"

    def get_group_store(self) -> Store:
        return self._store

    def shutdown(self) -> None:
        """Ends the threads, closes the sockets and frees the shared memory. Operations under way fail."""
        self._members.close()
        super().shutdown()

    def abort(self) -> None:
        self._members.close()
        super().abort()

    # -- reductions ------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        if any(tensor.is_sparse for tensor in tensors):
            return self._sparse(tensors, opts)
        return self._reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        return self._reduce("all_reduce", tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Operation:
        return self._reduce("reduce", tensors, opts, root=opts.rootRank)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Operation:
        return self._reduce_scatter(outputs, [each(parts) for parts in inputs], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        return self._reduce_scatter(outputs, [cut(tensor, self._even(tensor)) for tensor in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    # -- exchanges -------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Operation:
        (tensor,), root = tensors, opts.rootRank
        others = [member != root for member in range(self._members.size)]
        given = whole(tensor, others) if self._members.rank == root else nothing(self._members.size)
        taken = nothing(self._members.size) if self._members.rank == root else self._from(root, tensor)
        return self._exchange("broadcast", [given], [taken], tensors, opts, root=root)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        given = [self._to_all(tensor) for tensor in inputs]
        return self._exchange(
            "all_gather", given, [each(parts) for parts in outputs], list(chain.from_iterable(outputs)), opts
        )

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        return self.allgather([list(parts) for parts in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        given = [self._to_all(tensor) for tensor in inputs]
        taken = [cut(tensor, self._even(tensor)) for tensor in outputs]
        return self._exchange("all_gather", given, taken, outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        return self.all_gather_single_coalesced([output], [input], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Operation:
        root = opts.rootRank
        given = whole(inputs[0], [member == root for member in range(self._members.size)])
        taken = each(outputs[0]) if outputs else nothing(self._members.size)
        return self._exchange("gather", [given], [taken], list(chain.from_iterable(outputs)), opts, root=root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Operation:
        given = each(inputs[0]) if inputs else nothing(self._members.size)
        taken = self._from(opts.rootRank, outputs[0])
        return self._exchange("scatter", [given], [taken], outputs, opts, root=opts.rootRank)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        return self._exchange("all_to_all", [each(inputs)], [each(outputs)], outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Operation:
        sent, fault = split_sizes(input_splits, input, self._members.size)
        received, other_fault = split_sizes(output_splits, output, self._members.size)
        return self._exchange(
            "all_to_all", [cut(input, sent)], [cut(output, received)], [output], opts, fault=fault or other_fault
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Operation:
        return self._submit([lambda: self._meet(CollectiveCall("barrier"))], [], opts)

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> MessageWork:
        return self._members.messages.send(check_message(tensors), target, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MessageWork:
        return self._members.messages.receive(check_message(tensors, written=True), [source], tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        others = [member for member in range(self._members.size) if member != self._members.rank]
        return self._members.messages.receive(check_message(tensors, written=True), others, tag)

    # -- from arguments to programs --------------------------------------------------------------------------

    def _reduce(self, operation: str, tensors: list[Tensor], opts: Any, *, root: int = -1) -> Operation:
        """Tensors of one dtype are reduced together, in one row if they are several."""
        alike = [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]
        op = opts.reduceOp if opts is not None else "SUM"
        calls = [
            reduction_call(operation, group, [sum(map(Tensor.numel, group))], op, root=root, fault=unwritable(group))
            for group in alike
        ]
        keeps = root in (-1, self._members.rank)

        def program(call: CollectiveCall, group: list[Tensor]) -> Program:
            def work() -> None:
                values = flat(group[0]) if len(group) == 1 else row(group)
                reduction.all_reduce(self._members.rounds, call, values.elements, keeps=keeps)
                if keeps:
                    values.finish()

            return self._unless_faulty(call, work)

        return self._submit([program(call, group) for call, group in zip(calls, alike, strict=True)], tensors, opts)

    def _sparse(self, tensors: list[Tensor], opts: Any) -> Operation:
        (tensor,) = tensors
        call = sparse_call(tensor, opts.reduceOp if opts is not None else "SUM")
        program = self._unless_faulty(call, lambda: sparse_all_reduce(self._members.rounds, call, tensor))
        return self._submit([program], tensors, opts)

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[MemberParts], opts: Any) -> Operation:
        op = opts.reduceOp if opts is not None else "SUM"

        def program(output: Tensor, parts: MemberParts) -> Program:
            call = reduction_call(
                "reduce_scatter", [output, *parts.tensors], parts.sizes, op, fault=self._misfit(output, parts)
            )

            def work() -> None:
                target = flat(output)
                reduction.reduce_scatter(self._members.rounds, call, parts.open().of, target.elements)
                target.finish()

            return self._unless_faulty(call, work)

        programs = [program(output, parts) for output, parts in zip(outputs, inputs, strict=True)]
        return self._submit(programs, outputs, opts)

    def _exchange(
        self,
        operation: str,
        given: list[MemberParts],
        taken: list[MemberParts],
        outputs: list[Tensor],
        opts: Any,
        *,
        root: int = -1,
        fault: str = "",
    ) -> Operation:
        """Makes several calls if one cannot name all sizes."""
        step = max(1, MAX_SIZES // self._members.size)

        def program(gives: list[MemberParts], takes: list[MemberParts]) -> Program:
            wrong = fault or self._incomplete([*gives, *takes])
            call = exchange_call(operation, gives, takes, root=root, fault=wrong)
            return self._unless_faulty(call, lambda: exchange(self._members.rounds, call, gives, takes))

        programs = [
            program(given[start : start + step], taken[start : start + step]) for start in range(0, len(given), step)
        ]
        return self._submit(programs, outputs, opts)

    def _unless_faulty(self, call: CollectiveCall, work: Program) -> Program:
        """A member with an impossible call reports it to all. See Note [Words before data]."""
        return (lambda: self._meet(call)) if call.fault else work

    def _meet(self, call: CollectiveCall) -> None:
        agree(self._members.rounds, call, spin=True)

    def _submit(self, programs: Sequence[Program], outputs: list[Tensor], opts: Any) -> Operation:
        def job() -> None:
            for program in programs:
                program()

        done = self._members.submit(job, now=not getattr(opts, "asyncOp", True))
        return Operation(done, outputs, self._members.relieve)

    # -- places ----------------------------------------------------------------------------------------------

    def _to_all(self, tensor: Tensor) -> MemberParts:
        return whole(tensor, [True] * self._members.size)

    def _from(self, root: int, tensor: Tensor) -> MemberParts:
        return whole(tensor, [member == root for member in range(self._members.size)])

    def _even(self, tensor: Tensor) -> list[int]:
        return [tensor.numel() // self._members.size] * self._members.size

    def _incomplete(self, parts: list[MemberParts]) -> str:
        """Why there is not exactly one part for each member."""
        for part in parts:
            if len(part.places) != self._members.size:
                return f"{len(part.places)} tensors for {self._members.size} members"
            if len(part.tensors) == 1 and part.tensors[0].numel() > sum(part.sizes) > 0:
                return f"{part.tensors[0].numel()} elements cannot be split evenly among {self._members.size} members"
        return ""

    def _misfit(self, output: Tensor, parts: MemberParts) -> str:
        incomplete = self._incomplete([parts]) or unwritable([output])
        if not incomplete and output.numel() != parts.sizes[self._members.rank]:
            return f"an output of {output.numel()} elements for a part of {parts.sizes[self._members.rank]}"
        return incomplete


# -- opening -----------------------------------------------------------------------------------------------------


def open_group(request: Any, options: Any) -> Any:
    """Collective. torch calls it for `init_process_group("lockstep")` and `new_group`."""
    rank, size = request.group_rank, request.group_size
    store = _fresh(request.store, rank)
    hosts = find_hosts(rank, size, store)
    global_ranks = request.global_ranks_in_group or list(range(size))  # empty for the default group
    return open_among(hosts, rank, global_ranks, store, request.timeout)


def open_among(hosts: Hosts, rank: int, global_ranks: list[int], store: Store, timeout: timedelta) -> Any:
    """Collective. A process group in shared memory if there is one host, else a Gloo backend."""
    if len(hosts) > 1 or not semaphores.available:
        return _gloo(rank, len(global_ranks), store, timeout, ProcessGroupGloo.create_default_device())
    members = open_members(rank, len(global_ranks), global_ranks, store, timeout.total_seconds())
    loopback = ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)
    return SharedMemoryGroup(members, _gloo(rank, len(global_ranks), store, timeout, loopback), store)


def _gloo(rank: int, size: int, store: Store, timeout: timedelta, device: object) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device]
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def _fresh(store: Store, rank: int) -> Store:
    """A part of the store that no earlier group of the same name has used: torchrun keeps one store for all of them."""
    return PrefixStore(f"lockstep/{store.add(f'lockstep/opened/{rank}', 1)}", store)
