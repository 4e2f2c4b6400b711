"""From autograd to this worker's buckets.

- `layout`, `bucket`, `bucket_set`   which parameter sits where in which bucket
- `pipeline`, `fold`          how the gradients of lanes get there, and from there to the wire
- `hooks`                     when a bucket is full, and whether a gradient is still what arrived
- `rules`, `autograd_graph`, `loss_graph`   what a lane may not do, how it shows; backward passes as events
- `plan`, `step`, `record`    a step as a value, a step in flight, what a worker reports of it to all others
- `buffers`, `buffer_sum`, `batchnorm`   BatchNorm's statistics by lane; over the whole global batch
- `health`, `finite`, `fingerprint`      replicas that drift, gradients that are not finite
- `squares`                   what the noise of the gradient is measured from
- `marks`                     whether a newcomer gets the gradients that the others get
- `recorder`, `recorded_lane` the step's part in lanes that are replayed as CUDA graphs
"""
