"""Errors that stand for a mistake of the user's rather than of the program."""


class UserError(ValueError):
    """Bad input that one sentence explains: the thing, the value received and the remedy.

    The command lines print the sentence without a traceback and exit with 1. Any other exception
    is a bug and keeps its traceback.
    """


class InvalidLossError(UserError):
    """Training met a loss that is NaN or infinite."""
