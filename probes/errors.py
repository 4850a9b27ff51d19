"""Errors that are the user's to mend: the command line prints their message without a traceback and exits with 2."""

__all__ = ["CheckpointError", "Interrupted", "KeelError", "OutputError", "TextError", "UnsupportedModelError"]


class Interrupted(Exception):
    """A signal asked the work to stop, and what was done is kept. No error: the command line prints it and exits with 130."""


class KeelError(Exception):
    """Something about the input was wrong. The message says what, where, and what would work."""


class CheckpointError(KeelError):
    """A checkpoint cannot be read."""


class UnsupportedModelError(KeelError):
    """A model whose residual stream cannot be found."""


class TextError(KeelError):
    """A text that cannot be tokenised into at least one prediction."""


class OutputError(KeelError):
    """A place that cannot be written to."""
