"""Adds a slice over all workers in tree order and writes the sum to all of them, on the GPU.

# Note [One pass over GPU memory]
# As on the CPU (wire/shared/kernels.py): one kernel loads 16 bytes of every root, adds them in registers in the order
# of the tree, and stores the sum everywhere. Every element is read once and written once per worker: the least there
# is. Its source depends on the tree and the dtype only, and is compiled when it is first needed. Half precision is
# widened for an addition and rounded after it, as torch does. Where there is no compiler, or for other dtypes, torch's
# own operations do the work: the same bits, in more passes.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from lockstep.lanes import Branch, Root, Tree, leaves, renamed
from lockstep.wire.cuda import driver
from lockstep.wire.cuda.memory import tensor_at

Work = Callable[[int], None]
"""Does the additions on a stream, given by its number; returns at once."""

MOST_ROOTS = 64
"""A kernel for more would need too many registers."""

NUM_THREADS = 256
BLOCKS_PER_PROCESSOR = 8
VECTOR_BYTES = 16

_TYPES = {
    torch.float32: ("float", "float", "{x}", "{x}"),
    torch.float64: ("double", "double", "{x}", "{x}"),
    torch.float16: ("unsigned short", "float", "from_half({x})", "to_half({x})"),
    torch.bfloat16: ("unsigned short", "float", "from_bfloat16({x})", "to_bfloat16({x})"),
}
"""How an element is stored, in what it is added, and the ways there and back."""

_CONVERSIONS = """
__device__ float from_half(unsigned short x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ unsigned short to_half(float x) {
  unsigned short y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
}
__device__ float from_bfloat16(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
#if __CUDA_ARCH__ >= 800
__device__ unsigned short to_bfloat16(float x) {
  unsigned short y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
}
#endif
"""


@dataclass(frozen=True)
class Slice:
    """What is added: so many elements of a dtype, on the GPU whose work it is."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device


def summation(tree: Tree, values: Mapping[Root, int], places: Sequence[int], what: Slice) -> Work:
    """Work that writes the sum of `values`, bracketed by `tree`, to all `places`; may be repeated.

    Both are addresses that the GPU sees, multiples of 16; a place may be one of the values, but not overlap one
    otherwise. The caller keeps the memory.
    """
    if _suits_compiler(what, len(values)):
        return _compiled(tree, values, places, what)
    return _by_torch(tree, values, places, what)


def _suits_compiler(what: Slice, num_roots: int) -> bool:
    if what.device.type != "cuda" or not driver.compiles():
        return False
    if what.dtype not in _TYPES or num_roots > MOST_ROOTS:
        return False
    return what.dtype != torch.bfloat16 or torch.cuda.get_device_capability(what.device) >= (8, 0)


def aligned_slices(num_elements: int, num_parts: int, element_bytes: int) -> list[range]:
    """The contiguous parts of a bucket, each beginning at a multiple of 16 bytes; the last ones may be shorter."""
    width = max(1, VECTOR_BYTES // element_bytes)
    length = -(-num_elements // (num_parts * width)) * width
    bounds = [min(num_elements, length * part) for part in range(num_parts + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


# -- compiled -----------------------------------------------------------------------------------------------


def _compiled(tree: Tree, values: Mapping[Root, int], places: Sequence[int], what: Slice) -> Work:
    if not what.num_elements:
        return lambda stream: None
    roots = [leaf for leaf in leaves(tree) if isinstance(leaf, Root)]
    numbered = renamed(tree, {root: index for index, root in enumerate(roots)})
    kernel = _kernel(numbered, what.dtype, len(places), what.device)
    addresses = [*(values[root] for root in roots), *places]
    arguments = [ctypes.c_uint64(number) for number in (*addresses, what.num_elements)]
    num_blocks = _num_blocks(what)

    def work(stream: int) -> None:
        driver.launch(kernel, num_blocks, NUM_THREADS, stream, arguments)

    return work


def _num_blocks(what: Slice) -> int:
    processors = torch.cuda.get_device_properties(what.device).multi_processor_count
    num_vectors = -(-what.num_elements * what.dtype.itemsize // VECTOR_BYTES)
    return max(1, min(-(-num_vectors // NUM_THREADS), BLOCKS_PER_PROCESSOR * processors))


@lru_cache(maxsize=256)
def _kernel(tree: Tree, dtype: torch.dtype, num_places: int, device: torch.device) -> Any:
    with driver.on(device):
        return driver.kernel(source(tree, dtype, num_places), "add_slice", device)


def source(tree: Tree, dtype: torch.dtype, num_places: int) -> str:
    """CUDA C: a loop over whole vectors of 16 bytes, then one over what is left. Pure."""
    stored, _, _, _ = _TYPES[dtype]
    width = VECTOR_BYTES // dtype.itemsize
    roots = range(len(leaves(tree)))
    parameters = [f"const {stored}* in{i}" for i in roots] + [f"{stored}* out{i}" for i in range(num_places)]
    loads = "\n    ".join(f"const Vector v{i} = ((const Vector*)in{i})[at];" for i in roots)
    stores = "\n    ".join(f"((Vector*)out{i})[at] = sum;" for i in range(num_places))
    single_stores = " ".join(f"out{i}[at] = sum;" for i in range(num_places))
    return f"""{_CONVERSIONS}
struct alignas({VECTOR_BYTES}) Vector {{ {stored} x[{width}]; }};
extern "C" __global__ void add_slice({", ".join(parameters)}, unsigned long long count) {{
  const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  const unsigned long long stride = gridDim.x * (unsigned long long)blockDim.x;
  for (unsigned long long at = first; at < count / {width}; at += stride) {{
    {loads}
    Vector sum;
    #pragma unroll
    for (int i = 0; i < {width}; ++i) sum.x[i] = {_expression(tree, dtype, "v{}.x[i]")};
    {stores}
  }}
  for (unsigned long long at = count / {width} * {width} + first; at < count; at += stride) {{
    const {stored} sum = {_expression(tree, dtype, "in{}[at]")};
    {single_stores}
  }}
}}
"""


def _expression(tree: Tree, dtype: torch.dtype, leaf: str) -> str:
    """The sum as it is stored; every branch is rounded to what is stored before it is added to another."""
    _, _, there, back = _TYPES[dtype]
    if isinstance(tree, Branch):
        terms = (there.format(x=_expression(side, dtype, leaf)) for side in (tree.left, tree.right))
        return back.format(x=f"({' + '.join(terms)})")
    return leaf.format(tree)


# -- by torch -----------------------------------------------------------------------------------------------


def _by_torch(tree: Tree, values: Mapping[Root, int], places: Sequence[int], what: Slice) -> Work:
    there = {root: tensor_at(address, what.num_elements, what.dtype, what.device) for root, address in values.items()}
    into = [tensor_at(address, what.num_elements, what.dtype, what.device) for address in places]

    def value(node: Tree) -> torch.Tensor:
        if isinstance(node, Branch):
            return value(node.left) + value(node.right)
        assert isinstance(node, Root)
        return there[node]

    def work(stream: int) -> None:
        # Not ExternalStream: for the default stream, 0, that is one of torch's own streams, which waits for nothing.
        on_stream = torch.cuda.get_stream_from_external(stream, what.device) if what.device.type == "cuda" else None
        with torch.cuda.stream(on_stream):
            total = value(tree)
            for place in into:
                place.copy_(total)

    return work
