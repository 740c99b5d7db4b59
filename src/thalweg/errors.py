"""Errors that a person caused and can mend: one clear line, exit code 2, no traceback."""


class UserError(ValueError):
    """What was given, what is possible, what to do: the message is that one line."""
