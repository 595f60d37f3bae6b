"""Augmentation: what is drawn for each picture, and the work on the CPU and on a device.

draws       random numbers by seed, epoch and sample
geometry    the part of a picture that is served, resized and mirrored; shears, shifts and rotations
colour      operations on colours
operations  the operations by name, and a picture's or a batch's in their order
policies    settings, recipes by name, and what they draw
mixing      MixUp and CutMix within a batch
crops       what is served of each stored picture, by which of these
functions   functions of the caller
"""
