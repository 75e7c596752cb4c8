"""`python -m parallel3d.tools.gpu_check`: the acceptance on one GPU."""
