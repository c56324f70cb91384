"""Codemods that move modules and rename identifiers, from tables.

`moves.csv` and later `moves2.csv` list moves of files and folders. `moves` applies the last table,
and the page of old names has both. A row for a longer path overrides a row for a folder
that contains it, and an empty new path deletes the file.

`names.csv` lists new names of classes, functions and methods. A definition is found by its module,
so the same name elsewhere stays. It also lists settings (paths from the record of a process, with
dots), flags that are no settings, and metrics. `names` and `settings` can run again after a merge:
they rename what is left. `settings` runs mypy to find the uses of a setting in code. It leaves keys
of dictionaries, which the records reject at run time. Nothing applies the rows of label values,
events and log lines, because their words mean other things elsewhere: the page of renames has them.

To bring a branch over that was cut before a codemod's commit, run on that branch:

    git rebase COMMIT_BEFORE
    python -m tools.codemod replay --by settings COMMIT_BEFORE

It prints a rebase onto the codemod's commit. Run that, then `git rebase main`.
"""
