"""Lanes and updates that are recorded into CUDA graphs once and replayed after.

`capture` records work, or says why it cannot be; `recording` is what a step must know of a lane that was recorded, and
`recorder` tells it; `lanes` and `update` decide when to record, when to replay, and when to run as it is.
"""
