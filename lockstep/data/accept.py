"""Which loaders can be sharded, and what is said about those that cannot."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lockstep.errors import BadArgument

SPLIT, GROW = "split", "grow"


def accepted(loader: Any, batch: Any = SPLIT) -> "DataLoader[Any]":
    """The loader itself, if it is one whose meaning can be kept, and its batches can be made global ones as asked."""
    if not isinstance(loader, DataLoader):
        raise BadArgument(
            f"run.shard takes a torch DataLoader, not {_named(loader)}; "
            "any other source can be passed to run.lanes(batch) directly, one whole batch at a time."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise BadArgument(
            f"run.shard was given {_named(loader)}, a DataLoader that iterates in a way of its own; sharding "
            "would bypass it. Use a plain DataLoader, or iterate it yourself and pass each whole batch to "
            "run.lanes(batch)."
        )
    _refuse_other_rules(batch)
    if batch == GROW and loader.batch_sampler is None:
        raise BadArgument(
            f'run.shard(loader, batch="{GROW}") gives every lane a batch of the loader, and this one has none: with '
            "batch_size=None each item of the data set is a whole global batch already. Give the DataLoader a "
            f'batch_size, or leave batch="{GROW}" out.'
        )
    return loader


def _refuse_other_rules(batch: Any) -> None:
    if not isinstance(batch, str) or batch not in (SPLIT, GROW):
        raise BadArgument(
            f'run.shard takes batch="{SPLIT}" (a batch of the loader is a global batch, split between the lanes) or '
            f'batch="{GROW}" (every lane has a batch of its own of that size), not batch={batch!r}'
        )


def is_stream(loader: "DataLoader[Any]") -> bool:
    return isinstance(loader.dataset, IterableDataset)


def notes(loader: "DataLoader[Any]") -> list[str]:
    """What the user should know about how this loader will be read."""
    said = []
    if is_stream(loader) and loader.num_workers > 1:
        said.append(
            f"the data set {type(loader.dataset).__name__} is a stream: every worker reads all of it, in one "
            f"loading process instead of {loader.num_workers}, so that its samples come in one order"
        )
    if not getattr(loader, "in_order", True):
        said.append("in_order=False has no effect: batches come in order, the same on every worker")
    return said


def _named(thing: Any) -> str:
    return f"an object of type {type(thing).__name__}"
