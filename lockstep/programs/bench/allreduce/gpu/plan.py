"""What is usual on a GPU. Without torch."""

SIZES_ON_GPU = "64KiB..256MiB"
"""Below, a reduction takes as long as starting its kernels."""

COPY_BYTES = 2**30
"""What is copied to measure the memory's speed: far more than any cache holds."""
