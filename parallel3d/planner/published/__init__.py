"""Published measurements: their file format, the frameworks that were measured, and the planner's
errors on them."""
