"""Training steps on a GPU: every side is a process of its own, and the processes take turns.

`plan` says what to measure. `children` starts the processes and `talk` is how they are spoken to; `turns` lets them
prepare, agree and be timed, one at a time. In a child, `child` does what it is told with a side from `sides`
(`graph` is the one made by hand), of which `evidence` measures what it computed; `agreement` judges that.
`rows` makes the numbers to report, `claims` what they prove, `table` shows both. `measuring` does all of it.

# Note [A process for each side]
# Only one run of lockstep is active in a process, deterministic kernels and the choice of convolutions hold for a
# whole process, and captured graphs keep their memory. So each side is alone in its process, as its user would have
# it. All of them are there at the same time, and one computes while the others wait: blocks of all sides are
# interleaved, as in one process.
"""
