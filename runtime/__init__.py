"""Loads an artifact and runs it. Knows nothing of passes or templates, and does not import torch to load."""
