"""Peak memory of each pipeline rank, by kind."""
