"""The commands besides training: the planner's command line, checks, benchmarks."""

# A bare `import tools` would create a second copy of every class.
if __name__ != "parallel3d.tools":
    raise ImportError("import this as parallel3d.tools")
