"""Image trees to try things on: generated ones, and known public datasets."""
