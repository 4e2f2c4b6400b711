"""Which samples, in which order, exactly once: from the user's DataLoader to this worker's lanes.

- `loader`          what `run.shard` returns; `user_loader` checks which loaders it takes, and how large batches are
- `samplers`, `order`    which indices each global batch has, the same on every worker
- `passes`          where a pass begins, and whether it draws the same samples again
- `identity`        what a data set is made of, so that workers with different ones are found
- `fetch`           loading a global batch: from a data set with indices (`samples`), or from a `stream`
- `repeats`         whether a data set gives a sample again when it is read again
- `own_generators`  random generators that the script has made, which data sets may hold
- `inner_loader`    torch's loader, which runs the fetch; further lanes of a batch that was already handed out
- `batch`, `structure`, `contents`    a global batch as one worker holds it; what it is made of; digests of it
- `device`          bringing data to the run's device
"""

from lockstep.data.batch import GlobalBatch, Position
from lockstep.data.loader import ShardedLoader
from lockstep.data.structure import num_samples, take

__all__ = ["GlobalBatch", "Position", "ShardedLoader", "num_samples", "take"]
