"""Readers of events, which show or record them, and readers of what was recorded.

- `console`      lines on the screen; `noise_lines`, the noise in words; `progress`, a bar for long work
- `metrics`      what `run.log` is given, and the `sinks` it goes to
- `history`, `journal`, `recorder`, `finish`   files in the run's folder, made of `json_lines`
- `timeline`     where the time of steps goes
- `page`, `watch`   a run's folder in a browser, and in the terminal
"""
