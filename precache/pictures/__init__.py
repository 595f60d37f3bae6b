"""Pictures: recognising their files, and reading, decoding and resizing them, one at a time."""
