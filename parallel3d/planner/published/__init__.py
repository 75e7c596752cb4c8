"""Published measurements: their file format, and the planner's errors on them."""
