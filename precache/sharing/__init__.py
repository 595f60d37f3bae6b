"""Copying of converted datasets between machines.

publisher   sending of a dataset's files to a URL, the manifest last
push_pull   `precache push` and `precache pull`: choosing the files to copy, and refusing to overwrite others
"""
