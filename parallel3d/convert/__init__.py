"""Models written by others made tensor-parallel, and pretrained weights read into them."""
