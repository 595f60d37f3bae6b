"""What follows from measurements: pure."""
