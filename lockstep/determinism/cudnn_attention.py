"""cuDNN's attention with a backward pass that adds in one order, by cuDNN's Python front end.

# Note [cuDNN's other backward pass]
# torch's fastest attention on Hopper GPUs is cuDNN's. The backward pass that torch asks cuDNN for adds the gradients of
# the queries by atomics, in any order. cuDNN has another one, which takes about a tenth longer and adds in one order;
# torch cannot ask for it, cuDNN's Python front end can. So where that package is installed, torch chooses cuDNN's
# attention as it does anyway and computes the forward pass, and the operator of the backward pass is computed here,
# compiled or not.
# The kernel needs memory in proportion to the square of the sequence's length. Where that is too much, or cuDNN has no
# such kernel for the sizes, FlashAttention's deterministic backward pass goes on from cuDNN's forward pass: both keep
# the output and the logarithm of the sum of exponentials. Flash cannot do so where a mask was added or values were
# dropped. Then torch's own kernel is taken, of which torch warns, and it is reported as other such operators are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

OPERATOR = "_scaled_dot_product_cudnn_attention_backward"
SHARE = 64
"""The most memory that a kernel may need beside its results, as a divisor of the GPU's."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of torch's operator, in its order."""

    grad_out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    philox_seed: torch.Tensor
    philox_offset: torch.Tensor
    attn_bias: torch.Tensor | None
    cum_seq_q: torch.Tensor | None
    cum_seq_k: torch.Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    scale: float | None = None

    def laid_out(self) -> "AttentionCall":
        """Its incoming gradient lies in memory as the output does: cuDNN asks for it."""
        if self.grad_out.stride() == self.out.stride():
            return self
        return replace(self, grad_out=torch.empty_like(self.out).copy_(self.grad_out))

    def inputs(self) -> list[torch.Tensor]:
        """What the kernel reads, in the order of `_describe`."""
        bias = [] if self.attn_bias is None else [self.attn_bias]
        dropped = [self.philox_seed, self.philox_offset] if self.dropout_p else []
        return [self.query, self.key, self.value, self.out, self.grad_out, self.logsumexp, *bias, *dropped]

    def kind(self) -> tuple[Any, ...]:
        """What a graph depends on."""
        layouts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in self.inputs()]
        return (*layouts, self.attn_bias is None, self.dropout_p, self.is_causal, self.scale)

    def suits_flash(self) -> bool:
        """Whether FlashAttention can go on from this forward pass."""
        same_heads = self.query.shape[1] == self.key.shape[1] == self.value.shape[1]
        return self.attn_bias is None and not self.dropout_p and same_heads


@dataclass(frozen=True)
class BackwardGraph:
    """A backward pass of one kind that cuDNN has planned."""

    graph: Any
    tensors: Sequence[Any]
    workspace: int
    """In bytes."""


def front_end() -> Any | None:
    """cuDNN's Python front end, where it is installed and has loaded the cuDNN that torch has."""
    return _load()[0]


def front_end_note() -> list[str]:
    """A sentence where the front end is installed and cannot be used."""
    why_not = _load()[1]
    if not why_not:
        return []
    return [
        f"nvidia-cudnn-frontend is installed and cannot be used: {why_not}. Attention is computed by FlashAttention's "
        "kernels, to the same bits on any number of workers, but slower"
    ]


def _load() -> tuple[Any | None, str]:
    """The front end; or why an installed one cannot be used."""
    try:
        import cudnn

        found, wanted = cudnn.backend_version(), torch.backends.cudnn.version()
    except (ImportError, OSError, RuntimeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "cudnn"
        return None, "" if is_missing else str(error)
    return (cudnn, "") if found == wanted else (None, f"it has loaded cuDNN {found}, torch has {wanted}")


def exact_attention() -> str:
    """By which kernels exact runs on a GPU compute the backward pass of attention, as text to compare."""
    cudnn = front_end()
    if cudnn is None:
        return "FlashAttention's"
    return f"cuDNN's {cudnn.backend_version()} by its front end {cudnn.__version__}"


class CudnnBackward:
    """Computes torch's operator in one order, on one GPU. See Note [cuDNN's other backward pass].

    One owner, who calls `close`.
    """

    def __init__(self, cudnn: Any, device: torch.device, flash: Callable[..., Tensors]) -> None:
        self._cudnn, self._flash = cudnn, flash
        self._handle: Any = cudnn.create_handle()
        self._most_bytes = torch.cuda.get_device_properties(device).total_memory // SHARE
        self._graphs: dict[tuple[Any, ...], BackwardGraph | None] = {}

    def close(self) -> None:
        self._graphs.clear()
        self._cudnn.destroy_handle(self._handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensors:
        with torch._C._AutoDispatchBelowAutograd():
            if any(map(_is_traced, args)):
                return _by_torch(*args, **kwargs)
            call = AttentionCall(*args, **kwargs).laid_out()
            graph = self._graph(call)
            if graph is not None:
                return self._run(graph, call)
            if call.suits_flash():
                return self._flash(*_flash_arguments(call), scale=call.scale)
            return _by_torch(*args, **kwargs)  # which warns

    def _graph(self, call: AttentionCall) -> BackwardGraph | None:
        """None where cuDNN has no deterministic kernel for it that needs little enough memory."""
        kind = call.kind()
        if kind not in self._graphs:
            graph = self._plan(call)
            self._graphs[kind] = graph if graph is not None and graph.workspace <= self._most_bytes else None
        return self._graphs[kind]

    def _plan(self, call: AttentionCall) -> BackwardGraph | None:
        cudnn = self._cudnn
        types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
        graph = cudnn.pygraph(
            handle=self._handle,
            io_data_type=types[call.query.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        try:
            tensors = self._describe(graph, call)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            return None
        return BackwardGraph(graph, tensors, graph.get_workspace_size())

    def _describe(self, graph: Any, call: AttentionCall) -> list[Any]:
        """The graph's inputs, in the order of `inputs`, and the three gradients."""
        given = [self._tensor(graph, tensor) for tensor in call.inputs()]
        query, key, value, out, grad_out, stats = given[:6]
        masked: dict[str, Any] = {} if call.attn_bias is None else {"bias": given[6]}
        if call.dropout_p:
            masked["dropout"] = (call.dropout_p, *given[-2:])
        gradients = graph.sdpa_backward(
            q=query,
            k=key,
            v=value,
            o=out,
            dO=grad_out,
            stats=stats,
            attn_scale=call.scale if call.scale is not None else 1 / math.sqrt(call.query.shape[-1]),
            use_causal_mask=call.is_causal,
            use_deterministic_algorithm=True,
            **masked,
        )
        for described, like in zip(gradients, _gradients_of(call, "meta"), strict=True):
            described.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        return [*given, *gradients]

    def _tensor(self, graph: Any, tensor: torch.Tensor) -> Any:
        """Four dimensions, as cuDNN counts them."""
        types = self._cudnn.data_type
        kinds = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF, torch.float32: types.FLOAT}
        kind = kinds.get(tensor.dtype, types.INT64)
        four = tensor.reshape(1, 1, 1, 1) if tensor.dim() == 0 else tensor
        return graph.tensor(dim=list(four.shape), stride=list(four.stride()), data_type=kind)

    def _run(self, planned: BackwardGraph, call: AttentionCall) -> Tensors:
        gradients = _gradients_of(call, call.query.device)
        workspace = torch.empty(planned.workspace, dtype=torch.uint8, device=call.query.device)
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        buffers = dict(zip(planned.tensors, [*call.inputs(), *gradients], strict=True))
        planned.graph.execute(buffers, workspace, handle=self._handle)
        return gradients


def _gradients_of(call: AttentionCall, device: torch.device | str) -> Tensors:
    """Memory for the three gradients, laid out as torch lays them out."""
    query, key, value = (torch.empty_like(x, device=device) for x in (call.query, call.key, call.value))
    return query, key, value


def _flash_arguments(call: AttentionCall) -> tuple[Any, ...]:
    """In the order of FlashAttention's operator."""
    return (
        call.grad_out,
        call.query,
        call.key,
        call.value,
        call.out,
        call.logsumexp.squeeze(-1),
        call.cum_seq_q,
        call.cum_seq_k,
        call.max_q,
        call.max_k,
        0.0,
        call.is_causal,
        call.philox_seed,
        call.philox_offset,
    )


def _by_torch(*args: Any, **kwargs: Any) -> Tensors:
    gradients: Tensors = getattr(torch.ops.aten, OPERATOR)(*args, **kwargs)
    return gradients


def _is_traced(value: Any) -> bool:
    """Whether a compiler passes a tensor without values."""
    return isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
