"""What a model is on disk: GGUF read and written, Hugging Face directories and ggml files read as the same."""
