"""Training steps on a GPU: every side is a process of its own, and the processes take turns.

`plan` defines what is measured and makes the report from the times. `children` starts the processes and sends them
commands; `turns` prepares, compares and times them, one at a time. `child` is what runs in each of them.
"""
