"""Training steps on a GPU: every side is a process of its own, and the processes take turns.

`plan` defines what is measured and makes the report from the times. `children` starts the processes and sends them
commands; `turns` prepares, compares and times them, one at a time. `child` is what runs in each of them.

# Note [A process for each side]
# Only one run of lockstep is active in a process, deterministic kernels and the choice of convolutions hold for a
# whole process, and captured graphs keep their memory. So each side is alone in its process, as its user would have
# it. All of them are there at the same time, and one computes while the others wait: blocks are interleaved.
"""
