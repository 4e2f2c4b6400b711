"""What workers and launcher tell each other.

- `status`       the page in shared memory on which each worker writes what it does
- `failure`      how a worker failed, as a report in the run's folder, and the pipe that announces it
- `exits`        exit codes
- `control`      the launcher's requests for a copy, and the answers
- `stacks`       where a worker is in its code, asked by a signal
- `traceback_lines`  the lines of user code in a stack or an exception
"""
