"""What a run is made of, and how it is kept.

- `models`, `progress`, `carried`   what is replicated; where the run is in its data; what belongs to lanes
- `run_state`     all of it as a `snapshot`, whose form is the `schema`; `exact_state` restores it bit for bit
- `script_optimizers`  how the script has made its optimizers, compared after a resume
- `transfer`      a snapshot sent to a newcomer
- `checkpoints`   snapshots on disk, each a `tensor_file`
"""
