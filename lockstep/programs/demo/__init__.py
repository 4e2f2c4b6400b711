"""The demo: a small GPT learns Python's standard library on one, two and three workers, with one digest.

`worker` is the script that trains, by a `recipe`, on `text`; `show` starts it for each number of workers, `result`
judges what came back, and `report` writes it down with `curves`.
"""
