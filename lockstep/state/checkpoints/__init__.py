"""The checkpoints of a run.

`file` is one on disk, `folder` has several, with a `lock`, and is `in_use` by one training; `plan` says when they are
due. A run saves by `saver`, keeps the newest one `in_memory`, and goes on by `resume`; its `trail` shows then whether
it does what the run before did.
"""
