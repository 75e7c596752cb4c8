"""Pipeline schedules as plain data, built and proved by pure functions: what each pipeline rank
does in which order."""
