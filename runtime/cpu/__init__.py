"""Execution on CPUs: the artifact's library, called through its C interface."""
