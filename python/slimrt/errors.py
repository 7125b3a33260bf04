"""The exceptions slimrt raises. Each message says what is wrong, where, and what to do."""


class SlimrtError(Exception):
    """Base of all slimrt errors."""


class ModelFormatError(SlimrtError, ValueError):
    """A file is broken, truncated, or not of the format that it claims to be."""


class UnsupportedError(SlimrtError):
    """The file or request is valid, but slimrt does not support it; the message names what is supported."""


class CacheUnsupportedError(UnsupportedError):
    """A cache mode is not legal for this model; the message names the layer, the reason and the legal modes."""


class WontFitError(SlimrtError, MemoryError):
    """Too little memory.

    Attributes:
        needed, available: bytes.
        options: command-line flags with which it would fit, such as "--ctx 2048" (list of str).
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0, options: tuple[str, ...] = ()):
        super().__init__(message)
        self.needed, self.available, self.options = needed, available, list(options)


class ContextOverflowError(SlimrtError):
    """The context is full: more tokens than n_ctx."""


class DeviceError(SlimrtError, RuntimeError):
    """An operation failed on the GPU; the message says which. It may succeed in a new process."""


class DownloadError(SlimrtError, OSError):
    """A model cannot be downloaded: no such repository or file, no access, no connection, or no disk space; the message
    says what to do."""


class AudioError(SlimrtError, ValueError):
    """Audio that cannot be used: not an audio file, truncated, empty, or with samples that are NaN or infinite."""


class ChatError(SlimrtError, ValueError):
    """Messages that are not a valid conversation, or that the chat template refuses; the error says which message."""


class GrammarError(SlimrtError, ValueError):
    """A grammar, JSON schema or regular expression that is invalid or cannot be enforced; the message names the key."""
