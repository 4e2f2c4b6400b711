"""Which samples, in which order, exactly once: from the user's DataLoader to this worker's lanes.

- `loader`    what `run.shard` returns; `accept` says which loaders it takes
- `samplers`, `order`    which indices each global batch has, the same on every worker
- `passes`    where a pass begins, and whether it gives the same samples again
- `grow`      global batches with as many samples for each lane as the loader has in a batch
- `fetch`     loading a global batch: by `samples`, by `whole` items, or from a `stream`
- `again`     further lanes of a batch that was already handed out
- `keys`      where the random numbers of order, samples and collating come from
- `cut`, `batch`    a batch held whole, cut into lanes; a global batch as one worker holds it
"""

from lockstep.data.batch import GlobalBatch, Position
from lockstep.data.cut import num_samples, take
from lockstep.data.loader import ShardedLoader

__all__ = ["GlobalBatch", "Position", "ShardedLoader", "num_samples", "take"]
