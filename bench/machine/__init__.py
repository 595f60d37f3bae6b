"""Description and activity of this machine, and the speed of its memory, disk, decoder and GPU."""
