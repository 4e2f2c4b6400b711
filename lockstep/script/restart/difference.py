"""Something that is not as it was when the snapshot was taken, in words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """If it `is_wrong`, it cannot be meant so, and the script is refused; else it is noted."""

    words: str
    is_wrong: bool

    def __str__(self) -> str:
        return self.words
