"""Check that the packages that Baton imports are Baton's own.

Baton's packages have names that other distributions also use, such as `kernels` and `common`. If
two packages of one name are installed in an environment, the later one overwrites the first. The
check reads files and imports none of them.
"""

import base64
import hashlib
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "baton-serving"  # on PyPI, `baton` is another project
PACKAGES = (
    *("protos", "kernels", "common", "engine", "kvtransfer", "node", "prefill_node", "decode_node"),
    "encode_node",
    *("router", "api", "simulation", "bench", "cli"),
)
_HERE = Path(__file__).resolve().parent.parent


def clash() -> str | None:
    """Return a one-line description of a name clash, or None if there is none."""
    recorded = _recorded()
    for package in PACKAGES:
        spec = find_spec(package)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin == _HERE / package / "__init__.py" and recorded.get(package) in (
            None,
            _digest(origin),
        ):
            continue
        others = sorted(set(packages_distributions().get(package, ())) - {DISTRIBUTION})
        whose = f", but of {' and '.join(others)}" if others else ""
        return (
            f"the package {package!r} in {origin.parent if origin else 'no place'} is not "
            f"Baton's{whose}: install Baton into an environment of its own"
        )
    return None


def _recorded() -> dict[str, str]:
    """Return the digest of each package's __init__.py at installation. Empty in a checkout."""
    try:
        files = Distribution.from_name(DISTRIBUTION).files or ()
    except PackageNotFoundError:
        return {}
    return {
        file.parts[0]: file.hash.value
        for file in files
        if file.hash
        and file.name == "__init__.py"
        and Path(str(file.locate())).resolve() == _HERE / file.parts[0] / file.name
    }


def _digest(file: Path) -> str:
    """Return a file's digest in the format of a wheel's RECORD."""
    digest = hashlib.sha256(file.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
