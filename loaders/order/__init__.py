"""Which sample comes when, computed place by place at the same cost for any number of samples and ranks.

Pure: NumPy only, no state, the same on every machine. An order is a permutation of positions, a position
being a sample's rank in the stored order of its split. It depends on the seed, the epoch and what is stored,
never on workers or timing. All formats of one plan store their samples alike, and so serve them in the same
order.

`Epochs`, or `MixedEpochs`, is what all ranks serve; `Order` which part of it this one does, batch by batch.
"""
