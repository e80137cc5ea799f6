"""Passes: rewrites of graphs, one module each."""
