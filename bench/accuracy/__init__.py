"""The same model trained from several sources of the same pictures."""
