"""The demo model: at most two million parameters, trained to recall, copy, reverse and add.

`tasks` and `structured` make its training and test prompts, `train` writes `weights/`, and
`evaluate` measures them. Importing this package loads none of that.
"""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "weights"
