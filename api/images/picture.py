"""An image as a client names it."""

import msgspec


class Picture(msgspec.Struct, frozen=True):
    source: str | bytes  # data:...;base64,... or an address; bytes: of a file
    low_detail: bool = False
