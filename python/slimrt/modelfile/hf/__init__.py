"""Hugging Face directories, read as the metadata and tensors of a GGUF file; a new family is added here."""
