"""Workers of one host: shared memory, the semaphores that order it, and the sockets that show which one has died."""
