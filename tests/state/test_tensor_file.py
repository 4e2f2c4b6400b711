"""Files of tensors: what lockstep writes, the safetensors library reads, and it would have written the same."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import _SIZE, load_file, save_file

from lockstep.errors import BadArgument
from lockstep.state.tensor_file import NAMES, write_tensors

DTYPES = sorted(NAMES, key=str)


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of every dtype, all bits of which are used."""
    length = dtype.itemsize * torch.Size(shape).numel()
    raw = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)


def header(path: Path) -> tuple[int, dict[str, dict[str, object]]]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length, json.loads(content[8 : 8 + length])


def test_every_dtype_that_the_library_knows_is_known() -> None:
    assert {dtype for dtype in _SIZE if dtype is not None} == set(NAMES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_file_of_one_tensor_is_byte_for_byte_that_of_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, tensor in {"w": of(dtype, 3, 4), "none": of(dtype, 0, 2), "one": of(dtype, 1)}.items():
        write_tensors(tmp_path / "ours", {name: tensor})
        save_file({name: tensor}, tmp_path / "theirs")
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
        assert_equal(load_file(tmp_path / "ours"), {name: tensor})


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
named = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.tuples(st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.float4_e2m1fn_x2]), shapes),
    max_size=6,
)


@given(named)
def test_any_tensors_are_read_by_the_library_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    tensors = {name: of(dtype, *shape) for name, (dtype, shape) in forms.items()}
    path = tmp_path_factory.mktemp("file") / "tensors"
    write_tensors(path, tensors)
    assert_equal(load_file(path), tensors)
    start, entries = header(path)
    for name, tensor in tensors.items():
        assert (start + entries[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0  # type: ignore[index]


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    digest = write_tensors(tmp_path / "file", {"a": torch.randn(1000), "b": torch.tensor(2)})
    assert digest == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_views_parameters_and_tensors_that_share_memory_are_written_by_what_they_show(tmp_path: Path) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    turned = torch.randn(3, dtype=torch.complex64)
    tensors = {
        "base": base,
        "again": base,
        "columns": base[:, 1:3],
        "turned": base.T,
        "expanded": torch.ones(1).expand(5),
        "conjugate": turned.conj(),
        "negative": turned.conj().imag,
    }
    write_tensors(tmp_path / "file", tensors)
    assert_equal(load_file(tmp_path / "file"), {name: tensor.detach().clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(2, dtype=torch.complex128), "w is of dtype complex128, .* use complex64"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "w is of dtype bits8"),
        (torch.eye(2).to_sparse(), "w is a sparse_coo tensor"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name_before_there_is_a_file(
    tensor: torch.Tensor, told: str, tmp_path: Path
) -> None:
    with pytest.raises(BadArgument, match=told):
        write_tensors(tmp_path / "file", {"good": torch.ones(2), "w": tensor})
    assert not (tmp_path / "file").exists()
