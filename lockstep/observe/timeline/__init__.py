"""Where the time of a run's steps goes.

Each worker writes a `part`. `spans` are what it did from when to when, `clocks` brings those of several hosts together,
`trace` and `file` make one trace of all. `account` says where the time went, `account_lines` does so in words.
"""
