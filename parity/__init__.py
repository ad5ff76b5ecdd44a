"""Comparing two implementations of one model, stage by stage: see docs/parity.md.

``capture`` takes tensors out of a running module, ``measure`` says how far two of them are apart, a ``port`` says which
tensor of ours is which of the reference's, ``stages`` compares them in the order of execution.
"""
