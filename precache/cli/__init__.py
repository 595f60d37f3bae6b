"""The command line `precache`: commands, their options and output."""
