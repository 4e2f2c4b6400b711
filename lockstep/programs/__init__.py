"""Whole programs built on lockstep, which the commands start.

`bench`, `demo`, `doctor`, `verification`, `explain`, `memory` (`lockstep explain memory`), `advice` and `conversion`
(`lockstep init`) are programs. `models` and `large_models` are what they train, `packages` those from which some models
come; `tables` shows tables, and `svg` draws.
"""
