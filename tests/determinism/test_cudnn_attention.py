"""cuDNN's attention in exact runs: the right gradient, the same bits again, compiled and captured too."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.determinism import cudnn_attention
from lockstep.determinism.cudnn_attention import CudnnBackward, exact_attention, front_end, front_end_note
from lockstep.determinism.process import settle_process

REPEATS = 20
GPT, WIDE, ODD = (4, 12, 1024, 64), (2, 8, 512, 128), (3, 5, 77, 40)


def test_without_the_front_end_flash_attention_is_compared_between_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention, "front_end", lambda: None)
    assert exact_attention() == "FlashAttention's"


def test_a_front_end_of_another_cudnn_than_torchs_is_not_used_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OtherCudnn:
        backend_version = staticmethod(lambda: -1)

    monkeypatch.setitem(sys.modules, "cudnn", OtherCudnn)
    assert front_end() is None
    (note,) = front_end_note()
    assert "cannot be used: it has loaded cuDNN -1, torch has " in note


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise OSError('libcudnn.so.9: no such file')", "libcudnn.so.9: no such file"),
        ("import a_package_that_it_needs", "No module named 'a_package_that_it_needs'"),
    ],
)
def test_a_front_end_that_cannot_be_loaded_is_not_used_and_a_note_says_so(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cudnn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cudnn", raising=False)
    assert front_end() is None
    (note,) = front_end_note()
    assert f"cannot be used: {why}." in note


@pytest.mark.skipif(find_spec("cudnn") is not None, reason="the front end is installed")
def test_nothing_is_said_where_there_is_none() -> None:
    assert front_end_note() == []


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    with settle_process(1, exact=True, device=device):
        yield device


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were run."""
    seen: list[Any] = []
    own = CudnnBackward._run
    monkeypatch.setattr(CudnnBackward, "_run", lambda *args: (seen.append(args[1]), own(*args))[1])
    return seen


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Queries, keys and values as a model cuts them out of one projection."""
    batch, heads, length, width = shape
    torch.manual_seed(0)
    packed = torch.randn(batch, length, 3 * heads * width, device="cuda", dtype=dtype)
    cut = [part.view(batch, length, heads, width).transpose(1, 2) for part in packed.chunk(3, dim=2)]
    return [part.detach().requires_grad_() for part in cut]


def gradients(tensors: list[torch.Tensor], incoming: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    out = F.scaled_dot_product_attention(*tensors, **kwargs)
    return list(torch.autograd.grad(out, tensors, incoming.to(out.dtype)))


def reference(tensors: list[torch.Tensor], incoming: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """By the definition of attention, in single precision."""
    single = [tensor.detach().float().requires_grad_() for tensor in tensors]
    mask = kwargs.pop("attn_mask", None)
    with sdpa_kernel(SDPBackend.MATH):
        return gradients(single, incoming.float(), attn_mask=None if mask is None else mask.float(), **kwargs)


def furthest(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(
        float((f.float() - w.float()).abs().max() / w.float().abs().max()) for f, w in zip(found, wanted, strict=True)
    )


def incoming_for(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(tensors[0].shape, device="cuda", dtype=tensors[0].dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [GPT, WIDE, ODD], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_right_and_the_same_again(
    gpu: torch.device, graphs: list[Any], shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> None:
    tensors = inputs(shape, dtype)
    incoming = incoming_for(tensors)
    found = gradients(tensors, incoming, is_causal=causal)
    assert furthest(found, reference(tensors, incoming, is_causal=causal)) < 1e-2
    for _ in range(REPEATS):
        again = gradients(tensors, incoming, is_causal=causal)
        assert all(map(torch.equal, found, again))
    assert len(graphs) == 1 + REPEATS
    assert len({id(graph) for graph in graphs}) == 1


@pytest.mark.cuda
def test_a_mask_is_added(gpu: torch.device, graphs: list[Any]) -> None:
    tensors = inputs(GPT)
    incoming = incoming_for(tensors)
    mask = torch.randn(4, 12, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    found = gradients(tensors, incoming, attn_mask=mask)
    assert furthest(found, reference(tensors, incoming, attn_mask=mask)) < 1e-2
    assert len(graphs) == 1


@pytest.mark.cuda
def test_the_same_values_are_dropped_as_in_the_forward_pass(gpu: torch.device, graphs: list[Any]) -> None:
    shape, rate = (2, 4, 64, 64), 0.2
    tensors = inputs(shape)
    incoming = incoming_for(tensors)
    identity = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(shape).contiguous()
    torch.manual_seed(1)
    kept = F.scaled_dot_product_attention(*tensors[:2], identity, dropout_p=rate).detach() != 0
    torch.manual_seed(1)
    found = gradients(tensors, incoming, dropout_p=rate)
    assert len(graphs) == 1
    assert 0.75 < float(kept.float().mean()) < 0.85
    query, key, value = (tensor.detach().float().requires_grad_() for tensor in tensors)
    weights = (query @ key.transpose(2, 3) / 8).softmax(3) * kept / (1 - rate)
    wanted = list(torch.autograd.grad(weights @ value, (query, key, value), incoming.float()))
    assert furthest(found, wanted) < 2e-2


@pytest.mark.cuda
def test_a_gradient_that_lies_otherwise_in_memory_is_as_good(gpu: torch.device, graphs: list[Any]) -> None:
    tensors = inputs(GPT)
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    expanded = gradients(tensors, one.expand(GPT), is_causal=True)
    dense = gradients(tensors, torch.ones(GPT, device="cuda", dtype=torch.bfloat16), is_causal=True)
    assert all(map(torch.equal, expanded, dense))
    assert len(graphs) == 2


@pytest.mark.cuda
def test_flash_attention_goes_on_where_cudnn_needs_too_much_memory(
    gpu: torch.device, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudnnBackward, "_plan", lambda *_: None)
    tensors = inputs(GPT)
    incoming = incoming_for(tensors)
    found = gradients(tensors, incoming, is_causal=True)
    assert furthest(found, reference(tensors, incoming, is_causal=True)) < 1e-2
    for _ in range(REPEATS):
        assert all(map(torch.equal, found, gradients(tensors, incoming, is_causal=True)))
    assert not graphs
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.cuda
def test_what_neither_can_do_is_reported(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudnnBackward, "_plan", lambda *_: None)
    tensors = inputs(GPT)
    with pytest.warns(UserWarning, match="cuDNN Attention defaults to a non-deterministic algorithm"):
        gradients(tensors, incoming_for(tensors), dropout_p=0.2)


@pytest.mark.cuda
def test_a_kernel_that_needs_too_much_memory_is_not_used(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device, tensors = torch.device("cuda", 0), inputs(GPT)
    for share, num_graphs in ((cudnn_attention.SHARE, 1), (10**9, 1)):
        monkeypatch.setattr(cudnn_attention, "SHARE", share)
        with settle_process(1, exact=True, device=device):
            gradients(tensors, incoming_for(tensors), is_causal=True)
        assert len(graphs) == num_graphs
    assert graphs[0].workspace > 0


@pytest.mark.cuda
def test_no_operator_is_reported(gpu: torch.device, recwarn: pytest.WarningsRecorder) -> None:
    tensors = inputs(GPT)
    gradients(tensors, incoming_for(tensors), is_causal=True)
    assert not [str(warning.message) for warning in recwarn]


@pytest.mark.cuda
def test_a_compiled_function_has_the_same_kernel(gpu: torch.device, graphs: list[Any]) -> None:
    tensors = inputs(GPT)
    incoming = incoming_for(tensors)
    attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with torch._inductor.config.patch(compile_threads=1):  # else it leaves processes behind
        found = list(torch.autograd.grad(attend(*tensors), tensors, incoming))
    assert len(graphs) == 1
    assert all(map(torch.equal, found, gradients(tensors, incoming, is_causal=True)))


@pytest.mark.cuda
def test_a_recording_has_the_same_kernel(gpu: torch.device, graphs: list[Any]) -> None:
    tensors = inputs(GPT)
    incoming = incoming_for(tensors)
    wanted = gradients(tensors, incoming, is_causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(tensors, incoming, is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording, stream=stream):
        found = gradients(tensors, incoming, is_causal=True)
    for tensor in found:
        tensor.zero_()
    recording.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))
