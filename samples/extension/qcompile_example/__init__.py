"""A pass, a recipe and a weight format for qcompile."""

from pathlib import Path

RECIPE = Path(__file__).with_name("wide_ends.toml")
