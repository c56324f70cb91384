"""Import of an optional package, only in a tested release."""

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any


class Unavailable(Exception):
    """The package is missing, or its release is untested. The message says how to fix it."""


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package.

    Attributes:
        distribution: name in package registries.
        tested: prefix of the tested releases.
    """

    distribution: str
    module: str
    tested: str

    def installed(self) -> str | None:
        """Return the installed release, if any."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def load(self) -> Any:
        """Import the module. Raises Unavailable."""
        wanted = f"install {self.distribution}=={self.tested}.*"
        found = self.installed()
        if found is None:
            raise Unavailable(f"{self.distribution} is not installed: {wanted}")
        if not f"{found}.".startswith(f"{self.tested}."):
            raise Unavailable(f"{self.distribution} {found} has not been tested: {wanted}")
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise Unavailable(f"{self.distribution} {found} cannot be imported: {error}") from error
