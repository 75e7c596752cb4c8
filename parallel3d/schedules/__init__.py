"""Pipeline schedules as plain data: what each pipeline rank does in which order, and the proof that it runs to its end.

Every schedule is built, checked and priced here by pure functions. Without torch.
"""
