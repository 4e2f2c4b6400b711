"""What torch.compile decides is the same on every worker, or is reported."""

import logging
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from workers import apart

from lockstep.determinism import compiler
from lockstep.determinism.compiler import CompiledGraph, LimitWatch, look_at, settled_compiler, watched_compiler


def settings() -> tuple[Any, ...]:
    return dynamo.automatic_dynamic_shapes, dynamo.recompile_limit, inductor.deterministic


def test_the_compilers_settings_are_put_back() -> None:
    before = settings()
    with settled_compiler():
        assert settings() == (False, compiler.MOST_SIZES, True)
    assert settings() == before


def shapes_seen(sizes: list[int]) -> list[tuple[int, bool]]:
    """For which sizes something was compiled, and whether for all sizes at once."""
    seen: list[tuple[int, bool]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append((int(inputs[-1].shape[0]), look_at(graph, inputs, {}).dynamic))
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    for size in sizes:
        double(torch.ones(size))
    return seen


@apart
def test_what_a_size_is_compiled_to_does_not_depend_on_the_sizes_before() -> None:
    assert any(is_dynamic for _, is_dynamic in shapes_seen([3, 4]))  # as torch would
    torch._dynamo.reset()
    with settled_compiler():
        assert shapes_seen([3, 4, 5, 4]) == [(3, False), (4, False), (5, False)]


def attend(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.scaled_dot_product_attention(x, x, x), 0.1).sum()


def seen_by(options: dict[str, Any], *, dynamic: bool = False) -> CompiledGraph:
    found: list[CompiledGraph] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(look_at(graph, inputs, options))
        return graph.forward

    torch.compile(attend, backend=backend, dynamic=dynamic)(torch.ones(2, 4, 8))
    return found[0]


@apart
def test_attention_random_numbers_and_dynamic_shapes_are_found_in_a_graph() -> None:
    facts = seen_by({"max_autotune": True})
    assert (facts.attention, facts.random) == (("scaled_dot_product_attention",), ("dropout",))
    assert (facts.dynamic, facts.tunes) == (False, True)
    assert facts.objections() == []
    assert "attention by scaled_dot_product_attention · random numbers by dropout" in facts.words()
    torch._dynamo.reset()
    facts = seen_by({}, dynamic=True)
    assert facts.dynamic
    assert "dynamic=False" in facts.objections()[0]


def test_kernels_of_the_users_own_are_named() -> None:
    (said,) = CompiledGraph(3, own_kernels=True).objections()
    assert "Triton kernels of its own" in said


@apart
def test_what_is_compiled_is_told_and_what_may_cost_the_bits_is_said_once() -> None:
    wrapper = torch._TorchCompileInductorWrapper
    own, wrapper.__call__ = wrapper.__call__, lambda self, graph, inputs, **_: graph.forward  # no compiler is needed
    said: list[str] = []
    result: list[str] = []
    with settled_compiler(), watched_compiler(said.append, result.append):
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(lambda x: x * 2, dynamic=True)(torch.ones(3, 3))
    wrapper.__call__ = own
    assert len(result) == 2
    assert len(said) == 1


def key_of_kept_graphs(*allowed: SDPBackend) -> str:
    """What exact runs add to the key by which torch finds a graph that it has kept, where these may be chosen."""
    keys: list[str] = []

    def compiled(self: Any, graph: Any, inputs: Any, **_: Any) -> Any:
        keys.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    wrapper = torch._TorchCompileInductorWrapper
    own, wrapper.__call__ = wrapper.__call__, compiled
    torch._dynamo.reset()
    with sdpa_kernel(list(allowed)), settled_compiler():
        torch.compile(lambda x: x * 2)(torch.ones(2, 4, 8))
    wrapper.__call__ = own
    return keys[0]


@apart
def test_graphs_that_torch_keeps_are_found_again_only_by_exact_runs_with_the_same_choice_of_attention() -> None:
    assert key_of_kept_graphs(SDPBackend.MATH) != torch.compiler.config.cache_key_tag
    assert key_of_kept_graphs(SDPBackend.MATH) == key_of_kept_graphs(SDPBackend.MATH)
    assert key_of_kept_graphs(SDPBackend.MATH) != key_of_kept_graphs(SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)


def test_the_compiler_is_left_as_it_was() -> None:
    own = torch._TorchCompileInductorWrapper.__call__
    with watched_compiler(print, print):
        assert torch._TorchCompileInductorWrapper.__call__ is not own
    assert torch._TorchCompileInductorWrapper.__call__ is own
    assert not any(isinstance(one, LimitWatch) for one in logging.getLogger(compiler.LIMIT_LOGGER).filters)


@apart
def test_a_function_that_torch_stops_to_compile_is_reported_once() -> None:
    said: list[str] = []
    with settled_compiler(), watched_compiler(said.append, lambda _: None), dynamo.patch(recompile_limit=2):
        shapes_seen([3, 4, 5, 6, 7])
    assert len(said) == 1
    assert "torch runs it uncompiled from here on" in said[0]


@pytest.mark.parametrize("record", ["something else", "hit config.recompile_limit"])
def test_other_words_of_the_compiler_are_let_through(record: str) -> None:
    said: list[str] = []
    line = logging.LogRecord("torch", logging.WARNING, __file__, 1, record, None, None)
    assert LimitWatch(said.append).filter(line)
    assert said == []
