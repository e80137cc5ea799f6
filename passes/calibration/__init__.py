"""Choices by calibration text: codes of weights, clipping, salience of output features, bit budgets."""
