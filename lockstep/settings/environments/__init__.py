"""One small file per launcher environment, each with `place(environ) -> LaunchPlace | None`.

A file answers with the worker's place when its launcher started this process, with None when it did not, and
raises `BadEnvironment` when it did but left something out.
"""
