"""The published engine with a tiny V4.1 model on CPU processes."""
