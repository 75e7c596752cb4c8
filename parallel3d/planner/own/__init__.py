"""The memory of this project's own program: a walk through the actions of its schedule, moment by moment."""
