"""A step of the script, from the loop over its lanes to the update.

- `lane_loops`                what a loop over `run.lanes` is, and what is checked before and after it
- `step_loop`                 the lanes of a step, handed out once or again, and the commit; `StepGuard`
- `refusals`                  what a step says where the script is not where it should be
- `deferral`, `body_passes`   `run.steps`: a body as it is written for one process, also with several updates
- `updates`                   what happens around `optimizer.step()`
- `totals`                    sums over the lanes of an evaluation
"""
