"""An image as a client names it."""

import msgspec


class Picture(msgspec.Struct, frozen=True):
    source: str  # data:...;base64,... or an address
    low_detail: bool = False
