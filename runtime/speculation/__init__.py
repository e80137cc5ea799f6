"""Speculative decoding: the levels that draft, and how many tokens they draft."""
