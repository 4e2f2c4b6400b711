"""What decides and reports: it asks any pool, and starts nothing itself.

Decide (pure, tested without a process):
- `decisions`    what follows from an event: which worker is replaced, when all start again, when the run is over.
  `supervisor_state`: what it knows meanwhile
- `hangs`        which worker is stopped, late or hung; `stragglers`: which is slow, and with what

Do:
- `supervisor`   follows the workers and performs what was decided; `watchdog` names and kills those that hang
- `messages`     the sentences for the user
"""
