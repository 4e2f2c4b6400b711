"""A whole step as one CUDA graph, as a careful user writes it without lockstep."""

import torch

from lockstep.programs.bench.gpu.sides import Kit, Side

ORDINARY_STEPS = 3
"""Before the capture, on a stream of their own: libraries set themselves up, the optimizer makes its state."""


class ByHand(Side):
    """Forward, backward and update in one graph; a batch is copied to where the graph reads it."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit.model, torch.optim.AdamW(kit.model.parameters(), fused=True, capturable=True))
        self._batches, self._forward = kit.batches, kit.forward(kit.model)
        self._static = (kit.batches[0][0].clone(), kit.batches[0][1].clone())
        self._graph = self._capture()

    def step(self, number: int) -> None:
        for place, value in zip(self._static, self._batches[number % len(self._batches)], strict=True):
            place.copy_(value)
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(ORDINARY_STEPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(aside)
        self.optimizer.zero_grad(set_to_none=True)  # the graph makes gradients of its own, anew in every replay
        torch.cuda.empty_cache()  # what the ordinary steps used is of no use to the graph's own pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        return graph

    def _compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._forward(self._static).backward()
        self.optimizer.step()
