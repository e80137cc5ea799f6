"""Decoders that each differ in one odd but legal way from a plain one: compiled rightly, or refused by name."""
