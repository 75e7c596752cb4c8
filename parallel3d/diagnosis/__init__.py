"""Numbers that go wrong, and whose fault it is: the rank, its place on the mesh, and the
parameter."""
