"""Which sample comes when, place by place: the arithmetic below `loaders.order`. Pure."""
