"""How a collective works, round by round.

`request` is what is explained, `schedules` those that no run uses, `proof` shows that the sum is right, `story` has the
rounds. `screen` and `picture` show them.
"""
