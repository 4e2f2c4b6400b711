"""The GPU of a worker: its current stream, and what is known of it on the host."""

import torch

from lockstep.errors import BadArgument


class Gpu:
    """One GPU, as the calling thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> int:
        """The number of the current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def mark(self) -> torch.cuda.Event:
        """An event behind all that is in the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self) -> None:
        """Returns when the GPU has done everything that this process has given it."""
        torch.cuda.synchronize(self.device)


def refuse_another_gpu(wanted: torch.device, own: torch.device) -> None:
    """A worker adds on its own GPU."""
    if wanted.index is not None and own.index is not None and wanted.index != own.index:
        raise BadArgument(
            f"a parameter is on {wanted} and this worker's GPU is {own}: between several workers, all that is trained "
            "must be on run.device. A model that is spread over GPUs can be trained on one worker."
        )
