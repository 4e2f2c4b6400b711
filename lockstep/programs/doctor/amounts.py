"""Numbers as people read them."""

MiB = 1024**2
GiB = 1024**3


def size(num_bytes: float) -> str:
    """3.2 GiB, 64 MiB."""
    return f"{num_bytes / GiB:.1f} GiB" if num_bytes >= GiB else f"{num_bytes / MiB:.0f} MiB"


def count(number: int, one: str, many: str = "") -> str:
    """1 worker, 2 workers."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def plain(number: float) -> str:
    """2, 1.5."""
    return str(int(number)) if number == int(number) else f"{number:.2g}"
