"""Import of models: Hugging Face checkpoints, safetensors, `nn.Module` and `ExportedProgram`, as graphs of ATen operators."""
