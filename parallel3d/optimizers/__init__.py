"""The optimizers: torch's own where each element is stepped by itself, and ours where a step needs a whole matrix.

All of them step plain tensors, this rank's part of each parameter (`LocalParameter.local`), and keep their states laid
out as the parameter is. docs/optimizers.md says which to use.
"""
