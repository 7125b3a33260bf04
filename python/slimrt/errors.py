"""The exceptions slimrt raises. Each message says what is wrong, where, and what to do."""


class SlimrtError(Exception):
    """Base of all slimrt errors."""


class ModelFormatError(SlimrtError, ValueError):
    """A file is broken, truncated, or not what it says it is."""


class UnsupportedError(SlimrtError):
    """The file is well-formed but slimrt cannot run it; the message names what is supported."""


class CacheUnsupportedError(UnsupportedError):
    """A cache mode is not legal for this model; the message names the layer, the reason and the legal modes."""


class WontFitError(SlimrtError, MemoryError):
    """Too little memory.

    Attributes:
        needed, available: bytes.
        options: what would fit, as flags to try (list of str).
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0, options: tuple[str, ...] = ()):
        super().__init__(message)
        self.needed, self.available, self.options = needed, available, list(options)


class ContextOverflowError(SlimrtError):
    """The context is full: more tokens than n_ctx."""


class DeviceError(SlimrtError, RuntimeError):
    """A GPU failed at something it should be able to do; the message says at what. A new process may do better."""


class DownloadError(SlimrtError, OSError):
    """A model cannot be fetched: no such repository or file, no access, no connection, no room; says what to do."""


class AudioError(SlimrtError, ValueError):
    """A sound that cannot be used: not an audio file, cut off, empty, or with samples that are no numbers."""


class ChatError(SlimrtError, ValueError):
    """Messages that make no conversation, or that the chat template refuses; it says which message."""


class GrammarError(SlimrtError, ValueError):
    """A grammar, JSON schema or regular expression that is wrong, or that texts cannot be held to; it names the key."""
