"""Published measurements: their file format, the programs that were measured, and the planner's
errors on them."""
