"""Which workers, batch size, amp and pinning to choose: a grid of trials."""
