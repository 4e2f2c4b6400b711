"""What a data set is made of, as far as it shows without reading samples: equal on workers that have the same one.

# Note [Another data set on each worker]
# A worker loads its own lanes only, by their indices. If sample 17 is another one on each worker (a split, or an order,
# that is drawn before the generators are seeded; a list made from a set; files divided by the rank), some samples are
# trained on twice and others never, and nothing shows it. No sample is read to find that out: reading may open files
# that processes of a loader must open for themselves. What does show it are the data set's attributes: indices, names
# of files, labels, tensors. They are looked at before the first sample is read, and some of their elements are compared
# between workers, and after a resume.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from lockstep.data.contents import sampled_contents
from lockstep.data.structure import attributes

MOST_ELEMENTS = 1000
"""How many elements of a list are compared, at even distances."""

_MOST_ROWS, _MOST_COLUMNS = 100, 3
"""The same of the rows of a table, which may have to be read from a disk."""
_MOST_DEPTH, _MOST_PARTS, _MOST_INSIDE, _MOST_KEYS, _MOST_SHOWN = 4, 100, 16, 10_000, 60
_PLAIN = (int, float, complex, bool, bytes, type(None))
_OF_HUGGING_FACE = ("datasets", "Dataset")
_NUMERIC = "biufcSU"
"""The kinds of NumPy's dtypes whose elements are values, not objects."""


def made_of(data_set: Any, hidden: Callable[[Any], Collection[str]] = lambda _: ()) -> dict[str, str]:
    """What the data set holds, by the names of attributes: a glimpse, and a digest of some elements. Without those that
    are `hidden` of an object."""
    return dict(_parts(type(data_set).__name__, data_set, hidden, _MOST_DEPTH))


def _parts(name: str, holder: Any, hidden: Callable[[Any], Collection[str]], depth: int) -> Iterator[tuple[str, str]]:
    unseen = hidden(holder)
    for key, value in list(attributes(holder).items()):
        if key in unseen:
            continue
        words = _words(value)
        if words is not None:
            yield f"{name}.{key}", words
        for path, one in each_in(f"{name}.{key}", value):
            if depth > 0 and (isinstance(one, Dataset) or (_package(one), type(one).__name__) == _OF_HUGGING_FACE):
                yield from _parts(path, one, hidden, depth - 1)


def each_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The elements of a short list with their names, or the value itself."""
    if isinstance(value, list | tuple) and len(value) <= _MOST_PARTS:
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    else:
        yield name, value


def _words(value: Any) -> str | None:
    """The value in words, if it is made of plain elements; None if it is not, or if it is empty or a single one."""
    if _is_array(value):
        return f"{list(value.shape)} {sampled_contents(value)}" if len(value.shape) > 0 else None
    elements = _elements(value)
    if len(elements) < 2 or any(one is None for one in elements):
        return None
    first = ", ".join(map(str, elements[:3]))[:_MOST_SHOWN]
    return f"{len(value)}: {first}, ... {hashlib.blake2b(repr(elements).encode(), digest_size=6).hexdigest()}"


def _elements(value: Any) -> list[Any]:
    """Some elements in a form that can be compared, and None for each that has none."""
    if isinstance(value, dict):
        return sorted(map(_in_order, value.items()), key=repr) if len(value) <= _MOST_KEYS else []
    if isinstance(value, list | tuple | range):
        return [_in_order(one) for one in value[:: _distance(len(value), MOST_ELEMENTS)]]
    if _package(value) in ("pyarrow", "datasets") and hasattr(value, "column") and hasattr(value, "column_names"):
        columns = [value.column(number) for number in range(min(len(value.column_names), _MOST_COLUMNS))]
        rows = range(0, len(value), _distance(len(value), _MOST_ROWS))
        return [_in_order([column[row].as_py() for column in columns]) or "?" for row in rows]
    if _package(value) == "pandas" and hasattr(value, "columns"):
        rows = value.iloc[:: _distance(len(value), _MOST_ROWS), :_MOST_COLUMNS]
        return [_in_order(row) or "?" for row in rows.itertuples(name=None)]
    return []


def _distance(size: int, most: int) -> int:
    return max(1, -(-size // most))


def _in_order(element: Any) -> Any:
    """The element if it is plain, else None. Of a path the last two names count: hosts may hold it elsewhere."""
    if isinstance(element, str | os.PathLike):
        return "/".join(str(os.fspath(element)).split(os.sep)[-2:])
    if isinstance(element, _PLAIN):
        return repr(element)
    if _is_array(element):
        return sampled_contents(element)
    if isinstance(element, list | tuple) and len(element) <= _MOST_INSIDE:
        inner = [_in_order(one) for one in element]
        return None if any(one is None for one in inner) else inner
    return None


def _package(value: Any) -> str:
    return type(value).__module__.split(".")[0]


def _is_array(value: Any) -> bool:
    """Whether it is a tensor or an array whose elements can be read."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_meta
    return hasattr(value, "tobytes") and getattr(getattr(value, "dtype", None), "kind", "O") in _NUMERIC
