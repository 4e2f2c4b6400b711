"""Workers of one host: shared memory, the semaphores that order it, and the sockets that show who has died."""
