"""Errors that end a benchmark with one line on stderr."""

import argparse


class InvalidInput(argparse.ArgumentTypeError):
    """The command line, or a file that it names, is invalid. Exit code 2.

    A subclass of argparse's error, so that the parser of a flag can raise it.
    """


class UnusableRun(Exception):
    """The server or system cannot be measured. Exit code 1."""
