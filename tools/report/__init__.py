"""`parallel3d-report`, and the look of all HTML reports: script, style and the vendored uPlot."""
