"""Certificates made on the spot, as files that programs are told of."""

from datetime import datetime
from pathlib import Path

import trustme

from common.config import TlsConfig

LOOPBACK = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates, and is one that nobody knows unless told."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def write(
        self,
        directory: Path,
        *names: str,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
    ) -> TlsConfig:
        """Writes a certificate for `names` (of this machine, if none are given), its key and this
        authority to `directory`, over what is there. Each file changes at once."""
        issued = self._ca.issue_cert(
            *(names or LOOPBACK), not_before=not_before, not_after=not_after
        )
        directory.mkdir(parents=True, exist_ok=True)
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        cert, key = directory / "tls.crt", directory / "tls.key"
        _replace(cert, chain)
        _replace(key, issued.private_key_pem.bytes())
        return TlsConfig(cert=cert, key=key, ca=self.write_ca(directory))

    def write_ca(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        ca = directory / "ca.crt"
        _replace(ca, self._ca.cert_pem.bytes())
        return ca


def flags(knob: str, config: TlsConfig) -> list[str]:
    """Those that make a program read `config` as `knob`, such as "front.tls"."""
    given = config.model_dump(exclude_none=True)
    return [f"--{knob}.{name.replace('_', '-')}={value}" for name, value in given.items()]


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
