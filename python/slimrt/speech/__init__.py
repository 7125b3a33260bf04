"""Speech to text: audio files, log-mel spectrograms, and decoding with Whisper and Moonshine."""
