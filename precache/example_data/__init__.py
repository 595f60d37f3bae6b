"""Image trees for trying the project: generated ones and public datasets."""
