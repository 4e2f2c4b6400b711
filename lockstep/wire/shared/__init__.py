"""Workers of one host: shared memory, the semaphores that order it, and the sockets that show which one has died.

`segments`, `memory` and `once` are the memory, `semaphores`, `turns` and `board` the order, `neighbours` the sockets.
`reducer` adds in place, with `kernels`. Messages go through a `channel`, by a `mailbox` with its `transfers`.
"""
