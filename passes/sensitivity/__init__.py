"""Sensitivity: what each format costs each linear of a model, and the mixes of formats that cost least."""
