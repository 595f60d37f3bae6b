"""One measured run, whoever asks for it."""
