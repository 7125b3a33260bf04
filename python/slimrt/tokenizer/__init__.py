"""Text to token ids and back: tokenizers from GGUF files and Hugging Face directories, and chat templates."""
