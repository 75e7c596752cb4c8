"""All commands except training, such as the planner's command line, checks and benchmarks."""

# A bare `import tools` would create a second copy of every class.
if __name__ != "parallel3d.tools":
    raise ImportError("import this as parallel3d.tools")
