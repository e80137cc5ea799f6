"""Draft heads of the EAGLE-3 type (arXiv 2503.01840): their files, their computation in torch, and their training.

A head is one decoder layer that proposes tokens from the hidden states of the model that it drafts for.
"""
