"""What the demo trains, as a value that travels from the command to its workers. Without torch."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Recipe:
    """A small GPT on bytes. The batch is one that eight lanes cannot share evenly, and that is on purpose."""

    steps: int = 360
    batch_size: int = 28
    context: int = 48
    width: int = 96
    num_blocks: int = 2
    num_heads: int = 4
    learning_rate: float = 5e-3
    text_bytes: int = 2_000_000
    held_out_bytes: int = 12_000
    written_bytes: int = 256
    lanes: int = 8
    seed: int = 0
    device: str = "cpu"

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.context

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Recipe":
        return cls(**json.loads(text))
