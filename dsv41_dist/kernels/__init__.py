"""Triton and CuPy kernels as plain functions on tensors: no ranks, no engine."""
