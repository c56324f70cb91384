"""TLS as all programs use it.

credentials.py  what a program shows and whom it believes, read anew when its files change
channel.py      a channel that takes new certificates up
pem.py          what is in a PEM file
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
