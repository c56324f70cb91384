"""The demo model: two million parameters at most, trained to recall, copy, reverse and add.

`tasks` and `structured` make what it learns and is asked, `train` makes the weights in `weights/`,
`evaluate` measures them. Importing this package loads none of that.
"""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "weights"
