"""`lockstep doctor`: what about this machine will get in the way of a run, and what to type against it.

- `facts`      what is known about the machine, as one value
- `checks`     pure functions from facts to a result each; `diagnosis` is all of them together, as lines and as JSON
- `machine`    looks, and fills the facts in, with `control_groups` (what a container is limited to), `leftovers` (what
  ended runs left behind) and `checkpoint_trial` (tries to save and to load)

Nothing here imports torch, except the process of `checkpoint_trial`.
"""
