"""The published engine serving a tiny V4.1 on CPU processes: checkpoint writer, stand-ins for kernels, runner, verdict.

Nothing else of this package imports this room, except the command line.
"""
