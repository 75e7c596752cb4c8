"""`parallel3d-plan verify`: compares a dry run of one rank with the planner's memory estimate."""
