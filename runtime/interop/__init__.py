"""A loaded model as other libraries know models: for transformers, and for lm-evaluation-harness."""
