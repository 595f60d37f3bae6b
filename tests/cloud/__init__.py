"""An object storage on loopback, and a proxy before it that does what networks and storages do."""
