"""`parallel3d-launch check`: checks hardware, software and speed of nodes before training."""
