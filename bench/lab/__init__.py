"""Programs behind figures of README and of bench/results that no command of `bench` gives; not installed."""
