"""Benchmarks on this machine, side by side with other libraries. One harness, and a folder for each subject.

The harness: `plan` (what is measured, as values), `launch` (workers are started, and what worker 0 leaves is read),
`rounds` (in which order, and how far), `report` (medians and ratios), `machine` (where it was measured), `mps`
(one GPU for several processes), and, with torch, `sides` (ways to train, and whether two of them compute the same) and
`divided_sides` (torch's ways to divide an update).

The subjects: `step` (a training step), `gpu` (the same on a GPU), `allreduce` and `recovery` (what a killed worker
costs). In each of them `plan` defines what is measured and makes the report from the times, without torch.
"""
