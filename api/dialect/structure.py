"""How many values a JSON body has, counted before it is decoded.

Two bytes of JSON become an object of a hundred: a body of megabytes that is nothing but empty lists
costs seconds and hundreds of megabytes to decode, all of it on the event loop. Counting bytes that
separate values costs a few milliseconds. Says nothing of whether a body is JSON.
"""

from api.dialect.problems import Refusal

# Of texts, objects and lists, keys included. A conversation of 4096 messages with some parts each
# and hundreds of tools have less; so many take 50 ms to decode.
MAX_NAMED = 1 << 16
# Of anything else, which is token ids: a prompt of a million, in 100 ms, and twice that where the
# body has fields to be left out.
MAX_NUMBERS = 1 << 20


def check_structure(body: bytes) -> None:
    """
    Raises:
        Refusal: the body has more values than anything that can be asked for.
    """
    if len(body) <= MAX_NAMED or _fits(body):
        return
    # A text may have any of these bytes in it, so only what is outside of texts counts.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * MAX_NAMED or not _fits(b'""'.join(unescaped.split(b'"')[::2])):
        raise Refusal(
            413,
            f"the body has too many values: at most {MAX_NAMED} texts, lists and objects and "
            f"{MAX_NUMBERS} numbers are taken",
        )


def _fits(body: bytes) -> bool:
    named = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return named <= MAX_NAMED and body.count(b",") <= MAX_NAMED + MAX_NUMBERS
