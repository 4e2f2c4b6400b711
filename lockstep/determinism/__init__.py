"""The same bits again.

- `process`     threads, kernels and switches of a process, which a run sets and puts back
- `onednn`      CPU kernels that torch turns off by itself, on again for each lane
- `attention`   attention with a deterministic kernel; `cudnn_attention`: cuDNN's, where its front end is installed
- `compiler`    the decisions of torch.compile
- `operators`   those without a deterministic kernel are named
- `hardware`    what of the machine is compared between workers
"""
