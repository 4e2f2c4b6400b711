"""What this host says and keeps. Nothing here knows what a worker is.

- `processes`    what the kernel says of processes; `orphans`: ends those of a launcher that was killed
- `resources`    what this host and a container let processes use, and whether the kernel killed for memory
- `signals`      signals to this process as a file to wait for
- `addresses`    ports and network interfaces
- `folder`       the folder of a run
"""
