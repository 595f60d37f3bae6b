"""Loaders against one another in one interleaved run, and one result against another."""
