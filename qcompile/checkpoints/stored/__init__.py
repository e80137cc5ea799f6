"""Checkpoints that are already quantized: fp8, mxfp4, AWQ, GPTQ, compressed-tensors, torchao and others."""
