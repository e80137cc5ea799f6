"""Recipes of one's own: a base recipe, options of passes, and rules for some of the linears, in a TOML file."""
