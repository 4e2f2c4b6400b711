"""The page of a run: what its folder says, as a `view` made of `entries`, and the `log_tail` of each worker.

`server` shows it in a browser; `report` is the page as one file.
"""
