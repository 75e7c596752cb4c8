"""The commands beside training: benchmarks, checks, and the planner's front."""

if __name__ != "parallel3d.tools":  # a bare `import tools` would make a second class of everything
    raise ImportError("import this as parallel3d.tools")
