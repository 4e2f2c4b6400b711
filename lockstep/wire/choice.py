"""Which algorithm, and how large a bucket: decided from the size of a message, the workers and the link.

# Note [Price of an algorithm]
# A schedule with r rounds in which the busiest worker sends b bytes takes r·latency + b/bandwidth; its `Cost` has r and
# b. One-shot has one round less than direct and sends more: it wins for small messages, and always between two workers
# with one root each, where both send P.

# Note [Size of buckets]
# A small bucket leaves early, and little is left to wait for when the backward pass ends; a large one wastes less on
# latency. A bucket is as large as it must be for latency to be a tenth of its time, within bounds.
"""

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction
from lockstep.wire.link import Link
from lockstep.wire.schedules import Schedule, direct, oneshot
from lockstep.wire.schedules.exact import DIRECT, ONESHOT
from lockstep.wire.schedules.executor import Choose

MiB = 1024 * 1024
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 * MiB, 25 * MiB
LATENCY_SHARE = 0.1

EXACT = {"direct": direct, "oneshot": oneshot}
"""The algorithms that keep the brackets of the lane tree, by name."""

_COSTS = {"direct": DIRECT, "oneshot": ONESHOT}


def prices_s(reduction: Reduction, num_bytes: int, link: Link) -> dict[str, float]:
    """What each exact algorithm would take. See Note [Price of an algorithm]."""
    letters = {"W": len(reduction.folds), "K": max(reduction.roots_of), "P": num_bytes}
    return {name: link.price_s(*cost.of(**letters)) for name, cost in _COSTS.items()}


def cheapest(link: Link) -> Choose:
    """The exact algorithm with the lowest price for each message."""

    def choose(reduction: Reduction, num_bytes: int) -> Schedule:
        prices = prices_s(reduction, num_bytes, link)
        return EXACT[min(prices, key=prices.__getitem__)](reduction)

    return choose


def always(name: str) -> Choose:
    if name not in EXACT:
        raise BadArgument(f"algorithm must be one of {', '.join(map(repr, EXACT))}, or None to choose, not {name!r}")
    return lambda reduction, _: EXACT[name](reduction)


def bucket_bytes(link: Link, num_workers: int) -> int:
    """How large buckets should be on this link: whole MiB. See Note [Size of buckets]."""
    sent_share = 2 * (num_workers - 1) / num_workers
    worth_s = 2 * link.latency_s * (1 - LATENCY_SHARE) / LATENCY_SHARE
    best = worth_s * link.bytes_per_s / sent_share if sent_share else MOST_BUCKET_BYTES
    return int(min(max(best, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)) // MiB * MiB
