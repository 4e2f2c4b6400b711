"""The wire between GPUs: memory that workers of one host open to each other, or NCCL.

`driver` has the few calls of CUDA that torch does not offer; `memory` and `counters` are made of them;
`kernels` adds slices in tree order. The two reducers are `ipc`, in opened memory, and `slices`, by the collectives of
`nccl`. `stream` runs reductions beside the backward pass, and `gpu` has the watchdog that wakes a worker which waits
for its GPU when a peer has died. `pinned` is host memory that GPUs copy from and to. Nothing here touches CUDA when it
is imported.
"""
