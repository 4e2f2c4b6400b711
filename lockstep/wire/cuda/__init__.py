"""The wire between GPUs: memory that workers of one host open to each other, or NCCL.

`driver` and `compiler` are the few calls of CUDA that torch does not offer; `memory` and `counters` are made of them;
`kernels` adds slices in tree order; `ipc` and `nccl` are the two reducers; `stream` runs reductions beside the backward
pass, and `lookout` wakes a worker that waits for its GPU when a peer has died. Nothing here touches CUDA when it is
imported.
"""
