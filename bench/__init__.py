"""Measure loaders against a training step, and say which of the two waits for the other."""
