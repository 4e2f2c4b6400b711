"""Which GPUs reach each other, how fast, and whether that is what the link between them should give. Without torch.

# Note [What a link should give]
# `nvidia-smi topo -m` names the link of every pair: NV18 is eighteen NVLinks, each of 25 GB/s in one direction since
# Volta; PIX to SYS are ways over PCIe and the host, whose rate depends on slots and generations. So an NVLink is held
# against its number, and every link against the fastest of its kind on this machine. A rail that is routed wrongly, or
# a link that has fallen back, halves the rate: less than SLOW of it is named. A copy reaches about four fifths of a
# link, which is left out of the reckoning: SLOW is below it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.programs.doctor.diagnosis import CheckResult, ok, problem, warning

NVLINK_BYTES_PER_S = 25e9
SLOW = 0.6
MOST_NAMED = 6
TRIAL = "lockstep.programs.doctor.gpu_trial"
TRIAL_S = 300.0
ASKING_S = 20.0


@dataclass(frozen=True)
class GpuLink:
    """The way from one GPU to another: its kind by nvidia-smi ("" if not known), and what a copy moved in a second."""

    source: int
    target: int
    kind: str
    reaches: bool
    bytes_per_s: float

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        return f"GPU {self.source} → GPU {self.target}{kind}"


@dataclass(frozen=True)
class GpuTrial:
    """What was measured: copies inside of each GPU, copies between all pairs, and an all-reduce over all by NCCL.

    `nccl_bytes_per_s` is its bus bandwidth, what each GPU sends; None with one GPU, or where NCCL is not there.
    """

    own_bytes_per_s: tuple[float, ...]
    links: tuple[GpuLink, ...]
    nccl_bytes_per_s: float | None = None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The kind of link of every pair, from the table of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    columns = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    count = sum(re.fullmatch(r"GPU\d+", name) is not None for name in columns)
    found: dict[tuple[int, int], str] = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row[1 : 1 + count]:
            source = int(row[0][3:])
            found |= {(source, target): kind for target, kind in enumerate(row[1 : 1 + count]) if target != source}
    return found


def parse_trial(text: str, kinds: Mapping[tuple[int, int], str]) -> GpuTrial:
    """What the trial printed, with the links' kinds."""
    found = json.loads(text)
    links = tuple(GpuLink(a, b, kinds.get((a, b), ""), reaches, rate) for a, b, reaches, rate in found["pairs"])
    return GpuTrial(tuple(found["own"]), links, found["nccl"])


def due_bytes_per_s(link: GpuLink, links: Sequence[GpuLink]) -> float:
    """What a link should give. See Note [What a link should give]."""
    by_name = re.fullmatch(r"NV(\d+)", link.kind)
    named = int(by_name[1]) * NVLINK_BYTES_PER_S if by_name else 0.0
    return max(named, *(other.bytes_per_s for other in links if other.kind == link.kind))


def check_links(trial: GpuTrial) -> CheckResult:
    if not trial.links:
        return ok(f"one GPU: a copy on it moves {_rate(min(trial.own_bytes_per_s))}; there is no other to reach")
    slow = [link for link in trial.links if link.bytes_per_s < SLOW * due_bytes_per_s(link, trial.links)]
    if slow:
        named = [
            f"{link} moves {_rate(link.bytes_per_s)}, {_rate(due_bytes_per_s(link, trial.links))} are due"
            for link in slow
        ]
        return warning(
            f"{'; '.join(named[:MOST_NAMED])}{_more(len(named))}: a link is down, has fallen back or is routed wrongly",
            "nvidia-smi nvlink -s; nvidia-smi topo -m; look for errors of links in dmesg",
        )
    apart = [link for link in trial.links if not link.reaches]
    if apart:
        named = [str(link) for link in apart]
        return warning(
            f"no peer access: {'; '.join(named[:MOST_NAMED])}{_more(len(named))}: NCCL goes through the host's memory "
            'there, and wire="gpu" cannot be had between them',
            "give each worker a GPU of its own and leave the wire to lockstep, which takes NCCL; or switch off ACS and "
            "the IOMMU's translation for these slots",
        )
    return ok(f"all {len(trial.links)} ways between {len(trial.own_bytes_per_s)} GPUs: {_by_kind(trial.links)}")


def check_nccl(trial: GpuTrial) -> CheckResult:
    if not trial.links:
        return ok("one GPU: workers that share it add in its memory, not by NCCL")
    if trial.nccl_bytes_per_s is None:
        return problem(
            "NCCL cannot add between these GPUs", "install a torch with CUDA: https://pytorch.org/get-started/locally"
        )
    slowest = min(link.bytes_per_s for link in trial.links)
    sentence = f"an all-reduce by NCCL moves {_rate(trial.nccl_bytes_per_s)} from each GPU"
    if trial.nccl_bytes_per_s < SLOW * slowest:
        return warning(
            f"{sentence}, and the slowest link {_rate(slowest)}: NCCL goes another way than the links",
            "NCCL_DEBUG=INFO shows its way; look for NCCL_P2P_DISABLE and NCCL_P2P_LEVEL in the environment",
        )
    return ok(f"{sentence}; the slowest link moves {_rate(slowest)}")


def try_gpus() -> dict[str, CheckResult]:
    """Measures in a process of its own, and judges; by the names under which the results are shown."""
    done = subprocess.run([sys.executable, "-m", TRIAL], capture_output=True, text=True, timeout=TRIAL_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {
            "gpu links": problem(f"GPUs could not be tried: {last}", "look at nvidia-smi, and at CUDA_VISIBLE_DEVICES")
        }
    try:
        topology = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=ASKING_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # also where it is not installed
        topology = ""
    trial = parse_trial(done.stdout.strip().splitlines()[-1], parse_topology(topology))
    return {"gpu links": check_links(trial), "nccl": check_nccl(trial)}


def _by_kind(links: Sequence[GpuLink]) -> str:
    kinds = dict.fromkeys(link.kind for link in links)
    rates = {kind: [link.bytes_per_s for link in links if link.kind == kind] for kind in kinds}
    return ", ".join(f"{kind or 'link'} {_rate(min(found))} to {_rate(max(found))}" for kind, found in rates.items())


def _more(number: int) -> str:
    return f" and {number - MOST_NAMED} more" if number > MOST_NAMED else ""


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
