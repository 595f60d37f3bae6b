"""Other libraries on the same pictures, each in a process of its own, also of another Python."""
