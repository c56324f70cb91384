"""Codemods: see tools/codemod/__init__.py."""

import argparse
import sys
from pathlib import Path

from tools.codemod import moves, names, renames, settings
from tools.codemod.replay import replay

_HERE = Path(__file__).resolve().parents[2]
CODEMODS = {"moves": moves.rewrite, "names": names.rewrite, "settings": settings.rewrite}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.codemod", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    move = commands.add_parser("moves", help="move files and rewrite what refers to them")
    move.add_argument("--check", action="store_true", help="list the files and change nothing")
    rename = commands.add_parser("names", help="rename identifiers wherever they are used")
    rename.add_argument("--check", action="store_true", help="list the files and change nothing")
    commands.add_parser("settings", help="rename settings, flags and metrics")
    commands.add_parser("docs", help=f"write {renames.PAGE} and {renames.SETTINGS}")
    again = commands.add_parser("replay", help="rewrite the commits of a branch by a codemod")
    again.add_argument("--by", choices=CODEMODS, default="moves", help="the codemod (moves)")
    again.add_argument("before", help="the commit before the codemod's, which HEAD contains")
    options = parser.parse_args()
    if options.command == "replay":
        base, tip = replay(_HERE, options.before, CODEMODS[options.by])
        print(f"git rebase --onto COMMIT_OF_THE_CODEMOD {base} {tip}")
        return
    if options.command == "docs":
        renames.PAGE.write_text(renames.page())
        renames.SETTINGS.write_text(renames.settings())
        return
    if options.command == "settings":
        print(f"{len(settings.rewrite(Path.cwd()))} files changed")
        return
    if options.command == "names":
        _rename(check=options.check)
        return
    try:
        changed = moves.rewrite(Path.cwd(), check=options.check)
    except moves.NothingToMove:
        print("the tree has the new layout")
        return
    if options.check:
        print("\n".join(changed))
        sys.exit(1)
    print(f"{len(changed)} files moved or changed")


def _rename(*, check: bool) -> None:
    """Rename, then report each public class name that the product still uses twice."""
    root = Path.cwd()
    changed = names.rewrite(root, check=check)
    print("\n".join(changed) if check else f"{len(changed)} files changed")
    twice = {} if check else names.used_twice(names.python_files(root))
    for name, places in twice.items():
        print(f"{name} is used twice: {', '.join(places)}")
    sys.exit(bool(twice) or (check and bool(changed)))


if __name__ == "__main__":
    main()
