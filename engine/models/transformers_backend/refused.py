"""Why a class of transformers cannot be served here."""


class Refused(Exception):
    """Says why, as the end of a sentence whose subject is the class."""
