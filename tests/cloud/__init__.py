"""Object storages and a Hub on loopback, which do what networks and storages do."""
