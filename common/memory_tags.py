"""Parts of a node's memory that can be released for a while, named as in SGLang."""

from collections.abc import Sequence

from common.errors import InvalidRequest

KV_CACHE, WEIGHTS = "kv_cache", "weights"
MEMORY_TAGS = (KV_CACHE, WEIGHTS)


def memory_tags(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tags in a fixed order, each once.

    Args:
        names: empty: all tags.
    Raises:
        InvalidRequest: a name is unknown.
    """
    if unknown := [name for name in names if name not in MEMORY_TAGS]:
        raise InvalidRequest(
            f"tags: {unknown[0][:50]!r} is invalid: expected {', '.join(MEMORY_TAGS)}"
        )
    return tuple(tag for tag in MEMORY_TAGS if not names or tag in names)
