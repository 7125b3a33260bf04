"""Generation of tokens: options, sampling, beam search, speculative decoding, and the scheduler of steps."""
