"""Commands of `bench`: a file for each, named as the command; `options` and `output` are shared by them."""
