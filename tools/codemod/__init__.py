"""Codemods that move modules and rename identifiers, from tables.

`moves.csv` lists moves of files and folders. A row for a longer path overrides a row for a folder
that contains it, and an empty new path deletes the file.

`names.csv` lists new names of classes, functions and methods. A definition is found by its module,
so the same name elsewhere stays. `names` can run again after a merge: it renames what is left.

To bring a branch over that was cut before the moves, run on that branch:

    git rebase COMMIT_BEFORE_THE_MOVES
    python -m tools.codemod replay COMMIT_BEFORE_THE_MOVES COMMIT_OF_THE_MOVES
"""
