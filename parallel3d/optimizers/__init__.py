"""Optimizers: those of torch, variants with low-precision states, and Muon.

All of them update this rank's part of each parameter (`LocalParameter.local`). Their states are
sharded like the parameter.
"""
