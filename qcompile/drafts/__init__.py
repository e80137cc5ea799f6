"""Drafts of a build: which paths draft for which, and where draft heads come from."""
