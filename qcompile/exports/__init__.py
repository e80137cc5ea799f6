"""Checkpoints in the formats of other engines, written from the weights of an artifact."""
