"""The steps of a conversion or an update, from scan to commit, and who may write a destination."""
