"""The error for a class of transformers that cannot be served."""


class UnsupportedModel(Exception):
    """The class cannot be served. The text is the end of a sentence whose subject is the class."""
