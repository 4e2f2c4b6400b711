"""What this machine does, measured side by side with others. One harness, and a folder for each subject.

The harness: `plan` (what is measured, as values), `launch` (workers are started, and what worker 0 leaves is read),
`rounds` and `progress`, `spread` (medians, ratios), `table`, `machine` (where it was measured), `mps` (one GPU for
several processes), and, with torch, `sides` (ways to train) and `evidence` (whether two ways compute the same).

The subjects: `step` (a training step), `gpu` (the same on a GPU), `allreduce` and `recovery` (what a killed worker
costs). In each of them `plan` says what is measured and what is made of the times, without torch.
"""
