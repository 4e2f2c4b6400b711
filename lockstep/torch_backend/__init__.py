"""The torch.distributed backend "lockstep": collectives of one host's processes in shared memory."""
