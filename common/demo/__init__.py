"""A demo model: two million parameters at most that recall, copy, reverse and add.

`tasks` makes what it learns and is asked, `train` makes its weights, `evaluate` measures them.
Importing this package loads none of that.
"""
