"""The demo: a small GPT learns Python's standard library on one, two and three workers, with one digest.

`worker` is the script that trains, by a `recipe`, on `text`; `training` runs it once, `show` for each number of
workers, and `disturbance` once more while workers are killed (`kills` says whom and when, `members` who lives).
`result` judges what came back, and `report` writes it down with `curves`.
"""
