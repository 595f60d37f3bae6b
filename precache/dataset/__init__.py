"""Converted datasets: manifest, index, columns, shards, and functions that open, check and describe them."""
