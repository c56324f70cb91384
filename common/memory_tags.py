"""Parts of a node's memory, as SGLang names them, that it can do without for a while."""

from collections.abc import Sequence

from common.errors import InvalidRequest

KV_CACHE, WEIGHTS = "kv_cache", "weights"
MEMORY_TAGS = (KV_CACHE, WEIGHTS)


def memory_tags(names: Sequence[str]) -> tuple[str, ...]:
    """In order, each once.

    Args:
        names: none: all.
    Raises:
        InvalidRequest: there is no such part.
    """
    if unknown := [name for name in names if name not in MEMORY_TAGS]:
        raise InvalidRequest(f"tags: {unknown[0][:50]!r} is none of {', '.join(MEMORY_TAGS)}")
    return tuple(tag for tag in MEMORY_TAGS if not names or tag in names)
