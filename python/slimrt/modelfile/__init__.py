"""Model files: GGUF is read and written; Hugging Face directories and ggml files are read as GGUF."""
