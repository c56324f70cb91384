"""TLS for all processes.

credentials.py  certificates of a process and its authorities, reloaded when files change
channel.py      a channel that uses new certificates
pem.py          content of PEM files
"""

from common.tls.credentials import (
    Certificates,
    authority_end,
    certificates,
    channel_credentials,
    kind,
    names_and_end,
    server_contexts,
    server_credentials,
    shown_end,
)

__all__ = [
    "Certificates",
    "authority_end",
    "certificates",
    "channel_credentials",
    "kind",
    "names_and_end",
    "server_contexts",
    "server_credentials",
    "shown_end",
]
