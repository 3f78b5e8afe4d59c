"""What goes wrong by a user's mistake."""


class UsageError(Exception):
    """Its text is all that the user needs to see."""
