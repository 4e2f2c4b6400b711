"""Where the time of a run's steps goes: parts that workers write, a trace made of them, and an account in words."""
