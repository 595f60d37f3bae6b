"""The machine: its description, its activity, and the speed of its memory, disk, decoder and GPU."""
