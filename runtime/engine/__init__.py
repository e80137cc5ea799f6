"""The engine: continuous batching of requests over a paged KV cache."""
