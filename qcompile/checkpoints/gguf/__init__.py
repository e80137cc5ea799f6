"""Models in one file of llama.cpp (GGUF): its header, its configuration, its tokenizer, its tensors."""
