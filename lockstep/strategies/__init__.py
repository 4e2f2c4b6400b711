"""What a step means: who owns it between its lanes and the update."""
