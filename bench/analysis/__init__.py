"""What measured figures mean: medians and ratios with their spread, spikes, bottlenecks. Pure."""
