"""Batches on their way to the training loop: threads, read-ahead, devices."""
