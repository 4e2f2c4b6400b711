"""An account on the terminal, and as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.programs.memory.account import REPLICATED, GpuMemoryAccount, MemoryAccount

if TYPE_CHECKING:
    from rich.console import Console

MiB = 1024 * 1024
_UNKNOWN = "?"


def show(accounts: Sequence[MemoryAccount], title: str, console: "Console") -> None:
    """MiB of each worker, with its share of what stands once, and of the host; or of each worker's GPU."""
    from rich import box
    from rich.table import Table

    if not console.is_terminal:
        console.width = 100
    console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("MiB", no_wrap=True)
    for account in accounts:
        heading = account.strategy.replace(":", ":\n") if ":" in account.strategy else f"\n{account.strategy}"
        worker = "GPU" if isinstance(account, GpuMemoryAccount) else "worker"
        table.add_column(f"{heading}\n{worker}", justify="right")
        table.add_column("\n\nhost", justify="right")
    for number, part in enumerate(accounts[0].parts):
        table.add_row(part.name, *(cell for account in accounts for cell in _cells(account, number)))
    table.add_row("together", *(cell for account in accounts for cell in _totals(account)))
    console.print(table)
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


def _cells(account: MemoryAccount, number: int) -> tuple[str, str]:
    worker, host = account.shares(account.parts[number])
    return _mib(worker), _mib(host)


def _totals(account: MemoryAccount) -> tuple[str, str]:
    return _mib(account.worker_bytes), _mib(account.host_bytes)


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


def _mib(num_bytes: float | None) -> str:
    return _UNKNOWN if num_bytes is None else f"{num_bytes / MiB:,.0f}"
