"""Optimizers: those of torch, variants with low-precision states, and Muon.

All step this rank's part of each parameter (`LocalParameter.local`), and split their states like
the parameter.
"""
