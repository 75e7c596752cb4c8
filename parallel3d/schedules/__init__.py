"""Pipeline schedules as plain data: the actions of each pipeline rank, in order."""
