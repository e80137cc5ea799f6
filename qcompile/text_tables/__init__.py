"""Texts in tables of other programs: Parquet, Arrow, and saved datasets."""
