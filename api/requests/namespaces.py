"""The prefix cache namespace of a request, from its salt.

This is the only place that uses the salt. Nodes and the prefix index receive the namespace.
"""

from common.errors import InvalidRequest
from common.requests.namespace import SHARED, Namespace, namespace_of

MAX_SALT_CHARACTERS = 512


def decide(salt: str | None, owner: str) -> Namespace:
    """Return the namespace of a salt. Requests of one owner without a salt share a namespace.

    Args:
        owner: owner of the namespaces. The salts of other owners cannot reach them. "": shared by
            all clients.

    Raises:
        InvalidRequest: the salt is too long, or empty, which would silently isolate nothing.
    """
    if salt == "":
        raise InvalidRequest("cache_salt is empty; leave it out to share what is cached")
    if salt is not None and len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters, {MAX_SALT_CHARACTERS} allowed"
        )
    if salt is None and not owner:
        return SHARED
    return namespace_of(salt or "", owner)
