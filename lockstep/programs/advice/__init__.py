"""`lockstep advise`: what a run's own noise says about more workers.

- `record`   finds the newest measurement in a run folder, also while the run goes on
- `crew`     what to do with a given number of workers
- `report`   all of it together, for people and as JSON

Nothing here imports torch.
"""
