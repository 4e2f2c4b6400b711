"""GPUs, and whether torch can use them."""

from lockstep.programs.doctor.amounts import count, size
from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding, not_known, ok, warning


def gpus(facts: Facts) -> Finding:
    found = facts.gpus
    if found.names is None:
        return not_known("gpus", "whether there are GPUs")
    if not found.names:
        return ok("gpus", "no GPU: workers compute on the CPU")
    what = f"{count(len(found.names), 'GPU')}: {', '.join(_told(number, facts) for number in range(len(found.names)))}"
    if found.torch_cuda is None:
        return warning(
            "gpus",
            f"{what}; but this torch was built without CUDA, so workers compute on the CPU",
            "install a torch with CUDA: https://pytorch.org/get-started/locally (or say --device cpu on purpose)",
        )
    mps = "the MPS daemon runs" if found.mps else "no MPS daemon: workers that share a GPU take turns"
    return ok("gpus", f"{what}; torch has CUDA {found.torch_cuda}; {mps}")


def _told(number: int, facts: Facts) -> str:
    names, free_bytes = facts.gpus.names or (), facts.gpus.free_bytes
    return names[number] + (f" with {size(free_bytes[number])} free" if free_bytes is not None else "")
