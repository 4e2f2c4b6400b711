"""What runs inside of a worker's process.

- `__main__`     `python -m lockstep.launch.worker`: runs the user's script, and reports how it failed
- `identity`     which worker this process is
- `fork`         makes one worker out of another; `load_once`: the first one loads torch, and forks the others
- `spare`        waits, with torch loaded, until it becomes a worker
"""
