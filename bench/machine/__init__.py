"""What this machine is, and how fast its memory, disk, decoder and link to the device are."""
