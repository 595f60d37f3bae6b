"""Commands of `precache` that not everybody needs, in files of their own: `precache.cli` has the others."""
