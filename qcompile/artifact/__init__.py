"""Artifacts: their layout and manifest, writing, reading, verification, and export."""
