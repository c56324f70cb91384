"""The words, commands and marks that are one token each. Other words are spelled in letters."""

from pathlib import Path

MARKS = ("=", ",")

COMMANDS = ("add", "copy", "reverse")

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")

WORDS = tuple((Path(__file__).parent / "words.txt").read_text().split())
