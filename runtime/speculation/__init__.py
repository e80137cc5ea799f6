"""Speculative decoding: the stages that draft, and how many tokens they draft."""
