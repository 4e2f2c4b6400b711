"""`lockstep init`: turns a plain training script into a lockstep one, as far as its source shows how.

- `source`  what a script shows: its training loop, model, optimizer, loader
- `shown`   what it prints of its training, as all lanes have it
- `edits`   the lines that change, from that
"""
