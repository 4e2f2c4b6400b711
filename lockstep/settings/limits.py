"""How large the numbers may be that people write."""

MOST_LANES = 2**20
MOST_THREADS = 4096
MOST_SEED = 2**64 - 1
MOST_STEPS = 2**60
MOST_BYTES = 2**60

MOST_DIGITS = 20
"""Python itself refuses to read numbers of several thousand digits, with an error that names nobody."""


def as_whole(text: str) -> int | None:
    """The whole number, 0 or more, that the text is in decimal digits; None if it is none, or has too many digits."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS else None
