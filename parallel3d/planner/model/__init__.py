"""What is planned: the shape of a model, its parameters and floating-point operations, and the run
that trains it."""
