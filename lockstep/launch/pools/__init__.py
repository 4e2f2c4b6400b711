"""What starts, follows and ends workers: a file for each variant of `WorkerPool`, and their parts.

- `local_pool`     workers on this host; `replacements`: what may take a lost one's place, copies and spares
- `local_workers`  follows processes of this host until nothing of them is left, for any launcher
- `process`        one worker's process and the pipe of its output; `output`: the logs
- `ray_pool`       workers on a Ray cluster, which `ray_cluster` joins. `ray_actors` finds places for them and takes
  answers. Each `ray_worker` holds a `hosted_worker`: one worker's process for a launcher on another host
"""
