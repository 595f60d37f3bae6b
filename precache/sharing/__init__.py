"""Converted datasets on their way between machines: `precache push`, `precache pull`.

push_pull   what is copied, in which order, and what stands in the way
places      where it goes and comes from: object storages, dataset repositories of Hugging Face
"""
