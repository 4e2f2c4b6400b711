"""Adds a slice over all workers in tree order and writes the sum to all of them.

# Note [One pass over memory]
# With torch operations a sum of R tensors that goes to W places takes R - 1 additions and W - 1 copies, each a pass
# over its piece; the pieces stay in the cache, but every pass costs. A compiled loop takes one pass: it loads one
# vector of every root, adds them in registers in the order of the tree, and stores the sum everywhere. The loop depends
# on the tree and the dtype only, so LLVM compiles it when it is first needed, in some hundredths of a second.
# llvmlite is a wheel without dependencies, so no compiler is needed; without it torch does the work. The
# bits are the same: an addition is an addition, and its brackets are those of the tree.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from lockstep.lanes import Branch, Root, Tree, leaves, renamed

PIECE_BYTES = 256 * 1024
"""How much torch adds and copies at a time: what stays in a core's cache."""

VECTOR_BYTES = 256
"""How much the compiled loop takes of every root at a time."""

Work = Callable[[], None]

_LLVM_TYPES = {torch.float32: "float", torch.float64: "double"}


def summation(
    tree: Tree, values: Mapping[Root, torch.Tensor], places: Sequence[torch.Tensor], *, compiled: bool = True
) -> Work:
    """Work that writes the sum of `values`, bracketed by `tree`, to all `places`; may be repeated.

    All tensors are flat, on the CPU, and alike; a place may be one of the values, but not overlap one otherwise.
    """
    if compiled and places[0].dtype in _LLVM_TYPES and has_llvm():
        return _compiled(tree, values, places)
    return _by_torch(tree, values, places)


@lru_cache(maxsize=1)
def has_llvm() -> bool:
    """Whether additions are compiled, which takes the package llvmlite."""
    return importlib.util.find_spec("llvmlite") is not None


# -- compiled -----------------------------------------------------------------------------------------------


def _compiled(tree: Tree, values: Mapping[Root, torch.Tensor], places: Sequence[torch.Tensor]) -> Work:
    roots = [leaf for leaf in leaves(tree) if isinstance(leaf, Root)]
    numbered = renamed(tree, {root: index for index, root in enumerate(roots)})
    loop = _loop(numbered, _LLVM_TYPES[places[0].dtype], len(roots), len(places), places[0].element_size())
    inputs = (ctypes.c_void_p * len(roots))(*(values[root].data_ptr() for root in roots))
    outputs = (ctypes.c_void_p * len(places))(*(place.data_ptr() for place in places))
    num_elements = places[0].numel()
    kept = (dict(values), list(places))  # the memory must outlive the work

    def work() -> None:
        assert kept
        loop(inputs, outputs, num_elements)

    return work


@lru_cache(maxsize=256)
def _loop(tree: Tree, kind: str, num_inputs: int, num_outputs: int, element_bytes: int) -> Callable[..., None]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    source = _source(tree, kind, num_inputs, num_outputs, VECTOR_BYTES // element_bytes)
    module = llvm.parse_assembly(source)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    loop = signature(engine.get_function_address("sum"))
    loop.engine = engine  # type: ignore[attr-defined]  # owns the code
    return loop


def _source(tree: Tree, kind: str, num_inputs: int, num_outputs: int, width: int) -> str:
    """LLVM's assembly: a loop over whole vectors, then one over what is left. No flags that would change a sum."""
    pointers = [
        f"%{name}{i}.at = getelementptr ptr, ptr %{name}, i64 {i}\n  %{name}{i} = load ptr, ptr %{name}{i}.at"
        for name, number in (("in", num_inputs), ("out", num_outputs))
        for i in range(number)
    ]
    vector = f"<{width} x {kind}>"
    return f"""
define void @sum(ptr %in, ptr %out, i64 %n) {{
entry:
  {_lines(pointers)}
  %left = srem i64 %n, {width}
  %whole = sub i64 %n, %left
  br label %vectors
vectors:
  %v = phi i64 [ 0, %entry ], [ %v.next, %vector ]
  %v.more = icmp slt i64 %v, %whole
  br i1 %v.more, label %vector, label %singles
vector:
  {_lines(_body(tree, vector, kind, num_outputs, "v"))}
  %v.next = add i64 %v, {width}
  br label %vectors
singles:
  %s = phi i64 [ %whole, %vectors ], [ %s.next, %single ]
  %s.more = icmp slt i64 %s, %n
  br i1 %s.more, label %single, label %end
single:
  {_lines(_body(tree, kind, kind, num_outputs, "s"))}
  %s.next = add i64 %s, 1
  br label %singles
end:
  ret void
}}
"""


def _body(tree: Tree, taken: str, kind: str, num_outputs: int, at: str) -> list[str]:
    """Loads, additions and stores at index `at`, each value loaded just before it is needed."""
    lines: list[str] = []
    alignment = 4 if kind == "float" else 8

    def value(node: Tree) -> str:
        if isinstance(node, Branch):
            left, right = value(node.left), value(node.right)
            name = f"%{at}.sum{len(lines)}"
            lines.append(f"{name} = fadd {taken} {left}, {right}")
            return name
        name = f"%{at}.in{node}"
        lines.append(f"{name}.at = getelementptr {kind}, ptr %in{node}, i64 %{at}")
        lines.append(f"{name} = load {taken}, ptr {name}.at, align {alignment}")
        return name

    total = value(tree)
    for i in range(num_outputs):
        lines.append(f"%{at}.out{i}.at = getelementptr {kind}, ptr %out{i}, i64 %{at}")
        lines.append(f"store {taken} {total}, ptr %{at}.out{i}.at, align {alignment}")
    return lines


def _lines(lines: Sequence[str]) -> str:
    return "\n  ".join(lines)


# -- by torch -----------------------------------------------------------------------------------------------


def _by_torch(tree: Tree, values: Mapping[Root, torch.Tensor], places: Sequence[torch.Tensor]) -> Work:
    step = max(1, PIECE_BYTES // places[0].element_size())
    scratch = [
        torch.empty(min(step, places[0].numel()), dtype=places[0].dtype, device="cpu") for _ in range(_depth(tree))
    ]

    def work() -> None:
        for start in range(0, places[0].numel(), step):
            piece = slice(start, start + step)
            first, *others = (place[piece] for place in places)
            _sum(tree, piece, values, first, scratch)
            for other in others:
                other.copy_(first)

    return work


def _sum(
    tree: Tree, piece: slice, values: Mapping[Root, torch.Tensor], out: torch.Tensor, scratch: list[torch.Tensor]
) -> None:
    """Writes the sum of one piece to `out`, which may be one of the values; partial sums stay in the cache."""
    if isinstance(tree, Branch):
        left, right = _value(tree.left, 0, piece, values, scratch), _value(tree.right, 1, piece, values, scratch)
        torch.add(left, right, out=out)
    elif (only := _value(tree, 0, piece, values, scratch)).data_ptr() != out.data_ptr():
        out.copy_(only)


def _value(
    tree: Tree, depth: int, piece: slice, values: Mapping[Root, torch.Tensor], scratch: list[torch.Tensor]
) -> torch.Tensor:
    if isinstance(tree, Branch):
        left = _value(tree.left, depth, piece, values, scratch)
        right = _value(tree.right, depth + 1, piece, values, scratch)
        return torch.add(left, right, out=scratch[depth][: left.numel()])
    assert isinstance(tree, Root)
    return values[tree][piece]


def _depth(tree: Tree) -> int:
    return 1 + max(_depth(tree.left), _depth(tree.right)) if isinstance(tree, Branch) else 1
