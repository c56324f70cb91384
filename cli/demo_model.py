"""Writes the demo model (cli/demo) to a directory: it recalls, copies, reverses and adds.

It exists so that the whole system can be tried, and its answers checked, without a download. Runs
as a module of its own: python -m cli.demo_model DIR
"""

import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from cli.demo import DIRECTORY
from common.settings import ConfigArgumentParser, wrong


def write(directory: Path) -> None:
    """Copy the model to `directory`, completely or not at all.

    A directory that already holds the model is left unchanged.

    Raises:
        FileExistsError: `directory` holds something else.
    """
    if directory.exists() and any(directory.iterdir()):
        if _holds_the_model(directory):
            return
        raise FileExistsError(f"{directory} is not empty, and holds something else")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as workshop:
        made = Path(workshop) / directory.name
        shutil.copytree(DIRECTORY, made)
        if directory.exists():
            directory.rmdir()
        shutil.move(made, directory)


def _holds_the_model(directory: Path) -> bool:
    names = sorted(entry.name for entry in DIRECTORY.iterdir())
    if sorted(entry.name for entry in directory.iterdir()) != names:
        return False
    same, _, _ = filecmp.cmpfiles(DIRECTORY, directory, names, shallow=False)
    return len(same) == len(names)


def main() -> int:
    parser = ConfigArgumentParser(
        prog="baton demo-model",
        description="Writes a tiny model that recalls, copies, reverses and adds.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new, empty, or with the model")
    directory = parser.parse_args().directory
    try:
        write(directory)
    except OSError as error:
        wrong(parser.prog, str(error))
    print(
        f"{directory} has the model: ask it 'add 27 15 =' or "
        "'red fox = tea, blue owl = jam, red fox ='"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
