"""What ends a bench with one line."""

import argparse


class WrongInput(argparse.ArgumentTypeError):
    """The command line, or a file it names, asks for what cannot be. Exit code 2.

    argparse's own kind, so that what reads one flag can raise it."""


class Unusable(Exception):
    """The server or system to measure cannot be measured. Exit code 1."""
