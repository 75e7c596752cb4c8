"""`parallel3d-launch check`: what the nodes of a recipe have and how fast they are, before the
first step."""
