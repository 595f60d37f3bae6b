"""How one trial runs: what consumes its batches, in which process, and what is watched meanwhile."""
