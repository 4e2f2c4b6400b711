"""Who takes part: decides it, performs it, and guards every step while workers come and go.

`membership` decides, without a socket. `recovery` performs its actions: `endpoint` is the small store that each worker
keeps, `client` reaches another's, `opener` opens the wire of a generation. `guard` stands around each step;
`first_worker`, `requests`, `probation` and `newcomer` are its parts, `copies` replaces a worker by a fork of another.
`rendezvous` and `founders` bring the first workers, and later ones, together.
"""
