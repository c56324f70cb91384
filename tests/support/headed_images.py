"""Tiny image files that claim to be large."""

import io
import struct
import zlib

from PIL import Image as Pillow


def headed(kind: str, width: int, height: int) -> bytes:
    """Return a file of one pixel whose header says this size. A WEBP has that size."""
    if kind == "WEBP":
        start, rest = "524946461a000000574542505650384c0e0000002f", "071011fd0f4444ff03"
        size = struct.pack("<I", (height - 1) << 14 | (width - 1))
        return bytes.fromhex(start) + size + bytes.fromhex(rest)
    file = io.BytesIO()
    Pillow.new("P" if kind == "GIF" else "RGB", (1, 1)).save(file, kind)
    content = bytearray(file.getvalue())
    match kind:
        case "PNG":
            struct.pack_into(">II", content, 16, width, height)
            struct.pack_into(">I", content, 29, zlib.crc32(content[12:29]))
        case "JPEG":
            struct.pack_into(">HH", content, content.index(b"\xff\xc0") + 5, height, width)
        case "GIF":
            struct.pack_into("<HH", content, 6, width, height)
    return bytes(content)
