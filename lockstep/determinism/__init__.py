"""The same bits again: deterministic kernels, attention, operators that have none, what of the hardware is compared."""
