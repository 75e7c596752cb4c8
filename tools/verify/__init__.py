"""`parallel3d-plan verify`: a dry run of one rank on fake tensors, compared with the planner's
memory estimate."""
