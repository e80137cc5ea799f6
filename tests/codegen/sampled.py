"""Sampling options that the tests of kernels and library try."""

from __future__ import annotations

from typing import Any

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.5, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1e-3},
    {"temperature": 1e-300},
    {"temperature": 1e6, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 1 - 1e-7},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 5.0, "top_p": 0.3, "top_k": 7},
]
