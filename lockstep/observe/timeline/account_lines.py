"""The account of a step in ten lines, and what would help. Pure."""

from typing import Any

from lockstep.observe.timeline.account import PARTS, Account

SLOW_TIMES = 1.3
"""A worker whose lanes take so many times as long as those of the fastest one is named as slow."""
MUCH = 0.1
"""The share of a step from which on a part is worth a word."""


def account_lines(account: Account, name: str) -> list[str]:
    """`name` is the run's."""
    words = {
        "compute": "lanes, forward and backward",
        "waiting": _waited(account),
        "communication": f"exposed; {_ms(account.hidden_s)} of {_ms(account.reduce_s)} of reduction is hidden by lanes",
        "data": "waiting for the loader",
        "update": "optimizers",
        "host": "the script between steps",
    }
    return [
        f"{name} · {_count(len(account.workers), 'worker')} · {_steps(account)} · {_ms(account.step_s)} a step",
        *(_line(account, part, words[part]) for part in PARTS),
        *(
            []
            if not account.on_gpu
            else ["  On a GPU these are the host's times: what it has queued shows as waiting."]
        ),
        *([f"  {left}"] if (left := _left_out(account)) else []),
        f"What would help: {advice(account)}",
    ]


def as_json(account: Account, name: str) -> dict[str, Any]:
    return {
        "run": name,
        "steps": list(account.steps),
        "workers": list(account.workers),
        "step_s": account.step_s,
        "parts_s": dict(account.parts_s),
        "reduce_s": account.reduce_s,
        "hidden_s": account.hidden_s,
        "waited_for": {str(worker): num_steps for worker, num_steps in account.waited_for.items()},
        "lane_s": {str(worker): lane_s for worker, lane_s in account.lane_s.items()},
        "on_gpu": account.on_gpu,
        "steps_left_out": account.num_left_out,
        "advice": advice(account),
    }


def advice(account: Account) -> str:
    """One sentence about the largest part that can be made smaller."""
    shares = {part: account.share(part) for part in PARTS if part != "compute"}
    part = max(shares, key=lambda name: shares[name])
    if shares[part] < MUCH:
        return (
            f"{_percent(account.share('compute'))} is compute: faster kernels, or more workers with fewer lanes each."
        )
    return {
        "waiting": _about_waiting(account),
        "communication": "more lanes on each worker, or a larger batch, so that reductions hide behind more backward; "
        "reduce_dtype=torch.bfloat16 halves what is sent.",
        "data": "more loader processes (num_workers=), or less work for each sample: the loader is waited for.",
        "update": "an optimizer with fused=True; on a GPU run.captured(fn, optimizer).",
        "host": "less Python between steps: evaluate, log and read losses (loss.item()) less often.",
    }[part]


def slow_worker(account: Account) -> tuple[int, float] | None:
    """The worker whose lanes take longest, and how many times those of the fastest; None if all are about alike."""
    times = {worker: lane_s for worker, lane_s in account.lane_s.items() if lane_s > 0}
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda worker: times[worker])
    ratio = times[slowest] / min(times.values())
    return (slowest, ratio) if ratio >= SLOW_TIMES else None


def _about_waiting(account: Account) -> str:
    slow = slow_worker(account)
    if slow is not None:
        worker, ratio = slow
        return (
            f"worker {worker} takes {ratio:.1f} times as long for a lane as the fastest: give it fewer lanes "
            "(--assignment), or look for what else runs on its cores."
        )
    return "lanes of equal work for all: workers are about as fast, but do not end together (uneven lanes or samples)."


def _line(account: Account, part: str, words: str) -> str:
    return f"  {part:<14} {_ms(account.parts_s[part]):>10} {_percent(account.share(part)):>6}  {words}"


def _waited(account: Account) -> str:
    if not account.waited_for:
        return "for nobody"
    worker, num_steps = next(iter(account.waited_for.items()))
    return f"for worker {worker} in {num_steps} of {_count(len(account.steps), 'step')}"


def _left_out(account: Account) -> str:
    if not account.num_left_out:
        return ""
    return f"{_count(account.num_left_out, 'step')} in which workers came or went: left out, see the timeline."


def _steps(account: Account) -> str:
    first, last = account.steps[0], account.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
