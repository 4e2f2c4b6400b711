"""The same bits again: deterministic kernels, attention, operators without one, and the hardware that is compared."""
