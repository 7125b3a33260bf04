"""OpenAI's shapes, as llama-cpp-python has them: what a request may say, what an answer looks like, and the methods."""
