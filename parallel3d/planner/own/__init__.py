"""The memory of this project's own engine: a walk through the actions of its schedule, moment by moment."""
