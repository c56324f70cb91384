"""`baton demo-model`: writes the demo model (cli/demo), to try the system without a download."""

import filecmp
import json
import shutil
import sys
import tempfile
from pathlib import Path

from cli.demo import DIRECTORY
from common.settings import ConfigArgumentParser, wrong


def write(directory: Path) -> None:
    """Copy the model to `directory`, completely or not at all.

    Does nothing if the directory already contains the model.

    Raises:
        FileExistsError: `directory` contains something else.
    """
    if directory.exists() and any(directory.iterdir()):
        if _holds_the_model(directory):
            return
        raise FileExistsError(f"{directory} is not empty and holds something else")
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


def parser() -> ConfigArgumentParser:
    parser = ConfigArgumentParser(
        prog="baton demo-model",
        description="Write a small model that recalls, copies, reverses and adds.",
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="directory that is new, is empty or has the model",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main() -> int:
    options = parser().parse_args()
    directory = options.directory
    try:
        write(directory)
    except OSError as error:
        wrong("baton demo-model", str(error))
    if options.json:
        print(json.dumps({"directory": str(directory)}))
        return 0
    print(
        f"{directory} has the model. Prompts to try: 'add 27 15 =' and "
        "'red fox = tea, blue owl = jam, red fox ='"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
