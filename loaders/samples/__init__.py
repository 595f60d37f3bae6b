"""What a split serves: which samples, their fields and masks, and shards at URLs."""
