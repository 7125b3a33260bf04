"""From sound to text: audio files, log-mel spectrograms, and the rules by which Whisper and Moonshine are decoded."""
