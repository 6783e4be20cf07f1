"""The one exception that a user is meant to read."""


class Eagle3Error(Exception):
    """Bad input or a failed stage, told in one message: the file, the field, what was found, what is expected."""
