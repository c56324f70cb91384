"""Isolates tests from the machine they run on.

A test reads and writes only its own temporary directory and the files of the repository. The user's
settings, the files in the user's home directory, and the state directory of a `baton up` in the
same clone have no effect. Caches named by their content are in CACHES, so that runs share them.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHES = ROOT / "build" / "test-caches"
NO_HOME = Path(__file__).with_name("no_home")  # a file: no path below it can be opened or made
WRONG_SECRET = "the-secret-of-another-system-which-no-test-may-show"
_PRIVATE = ("BATON_", "XDG_", "HF_")  # prefixes of variables with the user's settings
_NAMES = "/dev/shm"


def isolated(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the user's settings and with a home that contains no files."""
    kept = {name: text for name, text in environment.items() if not name.startswith(_PRIVATE)}
    homes = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
    return {
        **kept,
        **dict.fromkeys(homes, str(NO_HOME)),
        "XDG_CACHE_HOME": str(CACHES),  # the compiled CPU operations
        "TRITON_HOME": str(CACHES),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHES / "inductor"),
        "CUDA_CACHE_PATH": str(CACHES / "cuda"),
        "HF_HOME": str(CACHES / "huggingface"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(CACHES / "hypothesis"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),  # `python -m tests...` works in every directory
    }


def apply() -> None:
    """Isolate this process and its child processes."""
    wanted = isolated(os.environ)
    os.environ.clear()
    os.environ.update(wanted)


@contextmanager
def apart(directory: Path) -> Iterator[Path]:
    """Work in a new directory whose state directory, `var`, belongs to another system.

    A command that uses its default state directory finds a wrong secret there, and cannot write a
    log. Temporary files are made in `directory` too.

    Raises:
        AssertionError: at the end, if a file of the working directory was made or changed.
    """
    here, temporary = directory / "here", directory / "tmp"
    (here / "var").mkdir(parents=True)
    temporary.mkdir()
    (here / "var" / "secret").write_text(f"{WRONG_SECRET}\n")
    (here / "var" / "log").write_text("a file where `baton up` wants a directory\n")
    before, came_from = _content(here), Path.cwd()
    old = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.chdir(here)
    try:
        yield here
    finally:
        os.chdir(came_from)
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if old is not None:
            os.environ["TMPDIR"] = old
    written = sorted(name for name, text in _content(here).items() if before.get(name) != text)
    assert not written, f"a test wrote {written} to its working directory: use tmp_path"


def _content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def left_behind() -> set[str]:
    """Return shared-memory names that no process has mapped.

    Other tests run at the same time, so only names of this test's processes are meaningful.
    """
    names = set(os.listdir(_NAMES))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped = maps.read_text()
            names = {name for name in names if f"{_NAMES}/{name}" not in mapped}
    return names
