"""Codemods that move modules and rename identifiers, from tables.

`moves.csv` lists moves of files and folders. A row for a longer path overrides a row for a folder
that contains it, and an empty new path deletes the file.

To bring a branch over that was cut before the moves, run on that branch:

    git rebase COMMIT_BEFORE_THE_MOVES
    python -m tools.codemod replay COMMIT_BEFORE_THE_MOVES COMMIT_OF_THE_MOVES
"""
