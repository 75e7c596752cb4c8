"""`parallel3d-launch check`: hardware, software and speed of the nodes of a recipe, before its
first step."""
