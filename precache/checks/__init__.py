"""What is asked of a tree, of converted datasets and of this machine, and the answers."""
