"""The demo: a small GPT learns Python's standard library on one, two and three workers, with one digest.

`worker` is the script that trains, by a `recipe`. `demonstration` runs it for each number of workers, and once more
while workers are killed (`kills` plans which and when). `result` compares the runs, and `report` shows them.
"""
