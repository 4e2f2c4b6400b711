"""From autograd to agreed gradients.

`layout` decides which parameter sits where in which bucket; `bucket` folds the lanes' gradients; `hooks` learns when a
bucket is full; `engine` runs a `step`: it reduces buckets while the last lane's backward pass goes on, after a `record`
of what each worker used has gone to all. `buffers` does for BatchNorm statistics what buckets do for gradients;
`batchnorm` computes them over the whole global batch.
"""
