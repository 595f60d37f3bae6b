"""The steps of a conversion, from scan to commit, and who may write a destination."""
