"""What torch.compile decides, and how these decisions are made the same on every worker.

# Note [What a compiler decides]
# A compiler chooses kernels, and other kernels give other bits. Four of its habits make the choice depend on the
# worker, and are switched off in exact runs:
# - it compiles a function for the first size it sees, and for all sizes when it sees a second one. Which sizes a worker
#   sees, and in which order, depends on the lanes that it carries. So every size is compiled for itself, and for more
#   sizes than torch would; beyond that torch goes on uncompiled, which is reported.
# - it times kernels and keeps the fastest, which changes from process to process. torch's Inductor has a mode in which
#   it does not.
# - it remembers between processes which sizes have changed. Nothing is remembered.
# - it keeps graphs between processes, with the kernel of attention that was chosen when a graph was made, and finds
#   them again without asking what may be chosen now: a graph of another program, with cuDNN's attention in it, would
#   come into an exact run. So the choice is part of the key by which exact runs find their graphs.
# What a script asks for goes over this: `dynamic=True`, or a dimension that is marked dynamic, is compiled once for all
# sizes, by kernels that suit the first one. That is reported, and `lockstep verify` lists it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

MOST_SIZES = 64
"""For how many sizes a function is compiled; torch's own limit is 8."""

LIMIT_HIT = "torch._dynamo hit config."
LIMIT_LOGGER = "torch._dynamo.convert_frame"
"""How torch's warning that it goes on uncompiled begins, and who gives it."""

ATTENTION = ("scaled_dot_product_attention", "flex_attention")
RANDOM = ("dropout", "rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal")
OWN_KERNELS = "triton_kernel_wrapper"


@dataclass(frozen=True)
class CompiledGraph:
    """What a compiler was given: the facts of one graph that bear on its bits."""

    num_operators: int
    dynamic: bool = False
    attention: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    own_kernels: bool = False
    tunes: bool = False

    def words(self) -> str:
        """`61 operators · attention by scaled_dot_product_attention · random numbers by dropout`."""
        parts = [f"{self.num_operators} operators"]
        parts += [f"attention by {', '.join(self.attention)}"] if self.attention else []
        parts += [f"random numbers by {', '.join(self.random)}"] if self.random else []
        parts += ["kernels of its own"] if self.own_kernels else []
        parts += ["max-autotune, without timing"] if self.tunes else []
        parts += ["dynamic shapes"] if self.dynamic else []
        return " · ".join(parts)

    def objections(self) -> list[str]:
        """Why its bits may differ between workers, and what to write instead."""
        found = []
        if self.dynamic:
            found.append(
                "a compiled function has dynamic shapes: its kernels suit the first size that a worker sees, so bits "
                "may differ between numbers of workers. Compile with dynamic=False, which compiles each size for "
                "itself; exact=False silences this"
            )
        if self.own_kernels:
            found.append(
                "a compiled function calls Triton kernels of its own, into which lockstep cannot look: bits may differ "
                "if they add by atomics, or are tuned by timing. `lockstep verify` shows whether they do"
            )
        return found


def look_at(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> CompiledGraph:
    """The facts of a graph that is about to be compiled with these options. Pure."""
    called = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    names = [_name(node.target) for node in called]
    return CompiledGraph(
        num_operators=len(called),
        dynamic=any(_is_dynamic(value) for value in inputs),
        attention=_found(names, ATTENTION),
        random=_found(names, RANDOM),
        own_kernels=any(OWN_KERNELS in name for name in names),
        tunes=bool(options.get("max_autotune")),
    )


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _found(names: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name.removesuffix("_") in wanted))


def _is_dynamic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


# -- in this process ------------------------------------------------------------------------------------------


@contextmanager
def settled_compiler() -> Iterator[None]:
    """Inside, what torch.compile decides is the same on every worker. See Note [What a compiler decides]."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    wanted: list[tuple[Any, str, Any]] = [
        (dynamo, "automatic_dynamic_shapes", False),
        (dynamo, "automatic_dynamic_local_pgo", False),
        (dynamo, "recompile_limit", max(MOST_SIZES, dynamo.recompile_limit)),
        (inductor, "deterministic", True),
    ]
    with ExitStack() as undo:
        for config, name, value in wanted:
            undo.callback(setattr, config, name, getattr(config, name))
            setattr(config, name, value)
        undo.enter_context(_compiling(_with_keys_of_its_own))
        yield


def _with_keys_of_its_own(compile_graph: Callable[[], Any], *_: Any) -> Any:
    config: Any = torch.compiler.config
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    allowed = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
    with config.patch(cache_key_tag=f"{config.cache_key_tag} lockstep exact, attention by {', '.join(allowed)}"):
        return compile_graph()


@contextmanager
def _compiling(around: Callable[[Callable[[], Any], Any, Any, Any], Any]) -> Iterator[None]:
    """Inside, a graph is compiled by `around(compile_graph, graph, inputs, options)`."""
    wrapper: Any = torch._TorchCompileInductorWrapper  # type: ignore[attr-defined]
    own = wrapper.__call__

    @wraps(own)
    def compiled(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return around(lambda: own(self, graph, inputs, *args, **kwargs), graph, inputs, self.config)

    wrapper.__call__ = compiled
    try:
        yield
    finally:
        if wrapper.__call__ is compiled:  # else other code has replaced it since
            wrapper.__call__ = own


@contextmanager
def watched_compiler(say: Callable[[str], None], tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, `tell` is called for every compiled graph, and `say` once of each thing that may cost the bits."""
    said, limit = set[str](), LimitWatch(say)

    def look(compile_graph: Callable[[], Any], graph: Any, inputs: Any, options: Any) -> Any:
        facts = look_at(graph, inputs, options)
        tell(facts.words())
        for objection in facts.objections():
            if objection not in said:
                said.add(objection)
                say(objection)
        return compile_graph()

    logging.getLogger(LIMIT_LOGGER).addFilter(limit)
    try:
        with _compiling(look):
            yield
    finally:
        logging.getLogger(LIMIT_LOGGER).removeFilter(limit)


class LimitWatch(logging.Filter):
    """Reports, once, that torch has stopped to compile a function for new sizes; lets every record pass."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._has_said = say, False

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(LIMIT_HIT) and not self._has_said:
            self._has_said = True
            self._say(
                f"a compiled function has met more than {MOST_SIZES} sizes or numbers, and torch runs it uncompiled "
                "from here on: bits may differ between numbers of workers. Pad to fewer sizes, give numbers as "
                "tensors, or leave the function uncompiled; exact=False compiles once for all sizes"
            )
        return True
