"""An image as a client sends it."""

import msgspec


class ImageInput(msgspec.Struct, frozen=True):
    source: str | bytes  # data:...;base64,... or a URL. bytes: the file
    low_detail: bool = False
