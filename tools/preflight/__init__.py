"""`parallel3d-launch check`: checks hardware, software and speed of the nodes before a recipe is
trained on them."""
