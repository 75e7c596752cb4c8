"""`parallel3d-plan verify`: a dry run of one rank on fake tensors, and the planner's memory
estimate beside it."""
