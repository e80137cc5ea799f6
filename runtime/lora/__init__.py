"""Adapters that requests choose: their factors in the artifact's linears, and the table by which kernels find them."""
