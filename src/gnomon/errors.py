"""The exceptions that gnomon raises on purpose, and the HTTP status that each one becomes.

In:  one message that says what is wrong, what was given, what is allowed, and what to do next.
Out: an exception class that the server and the CLI turn into a status or an exit code without
     looking at the text. Anything else that escapes is a defect of gnomon, not of its user.
Not here: HTTP and the shape of an OpenAI error body (server/errors.py), logging, retries.
"""

from __future__ import annotations


class GnomonError(Exception):
    """Root of everything that gnomon raises on purpose. HTTP 500 unless a subclass says else."""


class ConfigError(GnomonError):
    """A flag or a field of config.json is unknown, missing, contradictory or out of range.

    Raised at start, before memory is taken. No HTTP status: the CLI prints it and exits with 2.
    """


class CheckpointError(ConfigError):
    """A model folder cannot be loaded: a tensor is missing, unexpected, misshapen or damaged.

    Raised at start, before the cache is allocated. No HTTP status: the CLI exits with 2.
    """


class GeometryError(GnomonError):
    """The parts of a step disagree: rows, lengths, tables or an axis that is not theirs. HTTP 500.

    It means that a stage of gnomon made a wrong value; the step is not run.
    """


class LayoutError(GnomonError):
    """Cache bytes, shapes or strides do not fit the named cache format. HTTP 500."""


class UnsupportedError(GnomonError):
    """The wish is valid but nothing here can do it; the message names what would work instead.

    At start the CLI exits with 2. Out of a request: HTTP 400.
    """


class MissingLibraryError(UnsupportedError):
    """A library of others is not installed; the message says how to get it. Nobody is at fault.

    A forced provider without its library: the CLI exits with 2. Out of a request: HTTP 400.
    """


class RequestError(GnomonError):
    """One request is at fault; its neighbours are not touched. HTTP ``status``, 400 by default.

    ``param`` is the dotted name of the field at fault ("messages.0.role"), ``code`` a short
    stable word for programs ("context_length_exceeded"); both go into the OpenAI error body.
    ``status`` is a 4xx (401 for a wrong key, 404 for an unknown model, 413 for a huge body).
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class OverloadError(GnomonError):
    """The queue is full. HTTP 429 with ``Retry-After: retry_after_s`` (seconds, rounded up)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(GnomonError):
    """The engine process has gone, or is going down and takes no new work. HTTP 503."""


class NumericsError(GnomonError):
    """NaN or infinity where none may be, or a failed self-check; names the layer and operator.

    HTTP 500 for the request whose row it was, and for that request alone.
    """
