"""The exceptions of mooncrate.

Each also inherits the builtin that a Python user would catch, so code written against the reference API keeps working
without importing anything from here.
"""


class MooncrateError(Exception):
    """Base of every exception that mooncrate defines."""


class LayoutError(MooncrateError, ValueError):
    """A description of chunks, hashes or memory that contradicts itself; the message carries the numbers."""


class AddressOverflowError(MooncrateError, OverflowError):
    """An address or a size that does not fit unsigned 64-bit arithmetic."""


class StoreError(MooncrateError, RuntimeError):
    """The store cannot be used: missing library, failed set-up, or a call before set-up or after close."""


class ConfigError(MooncrateError, ValueError):
    """A setting that cannot be meant; the message names the file, the field and the value."""
