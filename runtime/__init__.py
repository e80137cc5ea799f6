"""Loads and runs artifacts. Knows nothing of passes or templates, and does not import torch to load one."""
