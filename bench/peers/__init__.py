"""Loaders and writers of other libraries, run in processes of their own, which may be of another Python."""
