"""One picture in: which files are pictures, how they are read, decoded and rendered."""
