"""Writes the demo model to a directory: it recalls, copies, reverses and adds (cli/demo).

It exists so that the whole system can be tried, and its answers checked, without a download. Runs
as a module of its own: python -m cli.demo_model DIR
"""

import shutil
import sys
import tempfile
from pathlib import Path

from cli.demo import DIRECTORY
from common.settings import Parser, wrong


def write(directory: Path) -> None:
    """Copies the model there, whole or not at all.

    Raises:
        FileExistsError: `directory` is there already and holds something.
    """
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as workshop:
        made = Path(workshop) / directory.name
        shutil.copytree(DIRECTORY, made)
        if directory.exists():
            directory.rmdir()
        shutil.move(made, directory)


def main() -> int:
    parser = Parser(
        prog="baton demo-model",
        description="Writes a tiny model that recalls, copies, reverses and adds.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty")
    directory = parser.parse_args().directory
    try:
        write(directory)
    except OSError as error:
        wrong(parser.prog, str(error))
    print(f"wrote {directory}: ask it 'add 27 15 =' or 'red fox = tea, blue owl = jam, red fox ='")
    return 0


if __name__ == "__main__":
    sys.exit(main())
