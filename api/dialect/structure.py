"""The number of values in a JSON body, counted before it is decoded.

Two bytes of JSON become an object of a hundred bytes. A body of megabytes of empty lists takes
seconds and hundreds of megabytes to decode, on the event loop. Counting the bytes that separate
values takes a few milliseconds. The count does not check that the body is valid JSON.
"""

from api.dialect.problems import ApiError

# Limit of texts, objects and lists, keys included. A conversation of 4096 messages with some parts
# each and hundreds of tools has fewer. Decoding this many takes 50 ms.
MAX_NAMED = 1 << 16
# Limit of all other values, which are token ids. A prompt of a million takes 100 ms, and twice that
# if the body has fields to be left out.
MAX_NUMBERS = 1 << 20


def check_structure(body: bytes) -> None:
    """Check the number of values in a body.

    Raises:
        ApiError: the body has more values than any valid request.
    """
    if len(body) <= MAX_NAMED or _fits(body):
        return
    # A text may contain any of these bytes, so only bytes outside of texts count.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * MAX_NAMED or not _fits(b'""'.join(unescaped.split(b'"')[::2])):
        raise ApiError(
            413,
            f"the body has too many values: at most {MAX_NAMED} texts, lists and objects and "
            f"{MAX_NUMBERS} numbers are taken",
        )


def _fits(body: bytes) -> bool:
    named = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return named <= MAX_NAMED and body.count(b",") <= MAX_NAMED + MAX_NUMBERS
