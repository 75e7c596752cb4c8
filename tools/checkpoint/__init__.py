"""`parallel3d-checkpoint`: checkpoints to other programs and from them, and what is in them."""
