"""Watching a training that is somebody else's script: what runs inside it, and what starts and ends it."""
