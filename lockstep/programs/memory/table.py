"""An account on the terminal, and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.programs.memory.account import REPLICATED, GpuMemoryAccount, MemoryAccount
from lockstep.programs.tables import show_table

if TYPE_CHECKING:
    from rich.console import Console

MiB = 1024 * 1024
_UNKNOWN = "?"


def show(accounts: Sequence[MemoryAccount], title: str, console: "Console") -> None:
    """MiB of each worker, with its share of what stands once, and of the host; or of each worker's GPU."""
    console.print(title, highlight=False)
    columns: list[tuple[str, Callable[[str], str]]] = [("MiB", lambda name: name)]
    for account in accounts:
        heading = account.strategy.replace(":", ":\n") if ":" in account.strategy else f"\n{account.strategy}"
        cells = {part.name: account.shares(part) for part in account.parts}
        cells["together"] = account.worker_bytes, account.host_bytes
        worker = "GPU" if isinstance(account, GpuMemoryAccount) else "worker"
        columns.append((f"{heading}\n{worker}", partial(_cell, cells, 0)))
        columns.append(("\n\nhost", partial(_cell, cells, 1)))
    show_table(columns, [*(part.name for part in accounts[0].parts), "together"], console)
    for line in _remarks(accounts):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def as_json(accounts: Sequence[MemoryAccount]) -> dict[str, Any]:
    return {
        account.strategy: {
            "host_bytes": account.host_bytes,
            "worker_bytes": int(account.worker_bytes),
            "parts": [{"name": part.name, "each_bytes": part.each, "once_bytes": part.once} for part in account.parts],
        }
        for account in accounts
    }


def _remarks(accounts: Sequence[MemoryAccount]) -> list[str]:
    is_gpu = isinstance(accounts[0], GpuMemoryAccount)
    taken = [account.worker_bytes if is_gpu else account.host_bytes for account in accounts]
    where = " on each GPU" if is_gpu else ""
    lines = [
        f"{account.strategy} takes {mine / taken[0]:.2f} of {REPLICATED}{where}."
        for account, mine in zip(accounts[1:], taken[1:], strict=True)
        if accounts[0].strategy == REPLICATED
    ]
    if any(part.each is None for part in accounts[0].parts):
        lines.append("Activations are not known: they depend on what the model is given.")
    others = ", CUDA itself" if is_gpu else ""
    return [
        *lines,
        f"Not counted: what operators and updates need for a moment, loaders, freed memory that is kept{others}.",
    ]


def _cell(held: Mapping[str, tuple[float | None, float | None]], place: int, name: str) -> str:
    num_bytes = held[name][place]
    return _UNKNOWN if num_bytes is None else f"{num_bytes / MiB:,.0f}"
