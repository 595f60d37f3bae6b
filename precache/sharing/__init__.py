"""Converted datasets on their way between machines.

publisher   files to a URL, the manifest last and alone; `precache convert` sends by it, too
push_pull   `precache push` and `precache pull`: what is copied, and what stands in the way
"""
