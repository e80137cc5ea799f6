"""Code generation: from the final graph to a program of kernel calls, packed weights, and kernels for a target."""
