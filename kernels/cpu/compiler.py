"""Builds the C++ of this folder for this machine, once, and keeps the result in the user's cache.

Knows nothing of what is in it. The name of a result says all that it was made from, so that none is
ever out of date; it is renamed into place whole, and of several programs that start at once one
compiles while the others wait.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-pthread",
    "-fPIC",
    "-Wno-psabi",
)
COMPILERS = ("c++", "g++", "clang++")
DEADLINE_S = 180.0  # a compilation takes some seconds of a free core
_POLL_S = 0.1


class NotCompiled(Exception):
    """There is no compiler, it failed, or the cache cannot be written. The text says which."""


def compiler() -> Path | None:
    """$CXX, or the first of COMPILERS in PATH."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    return Path(found) if found else None


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "baton" / "kernels"


def library(directory: Path, on_compile: Callable[[], None]) -> Path:
    """The shared library, from `directory` or compiled into it.

    Args:
        directory: of this user alone; made where it is missing.
        on_compile: called before a compilation, which takes seconds.
    Raises:
        NotCompiled: see there.
    """
    program = compiler()
    if program is None:
        raise NotCompiled(f"no C++ compiler: {', '.join(COMPILERS)} or $CXX")
    try:
        target = directory / f"{_key(program)}.so"
        if target.exists():
            return target
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(directory / "lock"):
            if not target.exists():
                on_compile()
                _compile(program, target)
    except OSError as error:
        raise NotCompiled(f"{directory}: {error}") from error
    return target


def _key(program: Path) -> str:
    """Of all that decides what a compilation makes, and where it may run."""
    digest = hashlib.sha256()
    for part in (*FLAGS, _said_by(program, "--version"), _processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What -march=native sees: a home may be shared by machines that differ."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.exists():
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    first = cpus.read_text().split("\n\n")[0]
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(kept))


def _said_by(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"{program} took longer than {DEADLINE_S:.0f} s") from error
    if done.returncode:
        raise NotCompiled(f"{program} failed: {_first_error(done.stderr)}")
    return done.stdout


def _compile(program: Path, target: Path) -> None:
    made = target.with_suffix(f".{os.getpid()}")
    sources = map(str, sorted(SOURCES.glob("*.cpp")))
    try:
        _said_by(program, *FLAGS, "-shared", *sources, "-o", str(made))
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with its holder, however that ends."""
    deadline = time.monotonic() + DEADLINE_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise NotCompiled(f"{path} was held for {DEADLINE_S:.0f} s") from error
                time.sleep(_POLL_S)
            else:
                break
        yield
