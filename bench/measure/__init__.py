"""Trials: runs that are measured, each in a process of its own, and the commands' plans of them."""
