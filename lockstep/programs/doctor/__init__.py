"""`lockstep doctor`: which properties of this machine will hinder a run, and what to type against it.

- `facts`      what is known about the machine, as one value
- `checks`     pure functions from facts to a result each; `diagnosis` is all of them together, as lines and as JSON
- `machine`    gathers the facts, with `leftovers` (what ended runs left behind), `gpu_links` (how GPUs are joined),
  `checkpoint_trial` and `gpu_trial` (which try)

Nothing here imports torch, except the processes of the trials.
"""
