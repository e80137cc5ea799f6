"""Execution on NVIDIA GPUs: the driver, memory, CUDA graphs, and rounds of speculation."""
