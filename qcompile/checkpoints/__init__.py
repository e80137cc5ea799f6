"""Import of models (Hugging Face, safetensors, `nn.Module`, `ExportedProgram`) as graphs of ATen operators."""
