"""OpenAI's API: requests, responses, and the methods of Model with llama-cpp-python's names."""
