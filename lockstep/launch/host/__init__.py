"""What this host says and keeps. Nothing here knows what a worker is.

- `processes`    what the kernel says of processes; `orphans`: ends those of a launcher that was killed
- `memory`       how much is free, and whether the kernel killed for it; `control_groups`: what a container may use
- `signals`      signals to this process as a file to wait for
- `addresses`    ports and network interfaces
- `folder`       the folder of a run
"""
