"""Which namespace of the prefix caches a request is in. The salt of a request is decided here and
nowhere else; nodes and the prefix index are told what came of it."""

from common.errors import InvalidRequest
from common.requests.namespace import SHARED, Namespace, namespace_of

MAX_SALT_CHARACTERS = 512


def decide(salt: str | None, owner: str) -> Namespace:
    """That of the salt which the client gives, shared by all of its owner's who give none.

    Args:
        owner: whose namespaces they are, which no other owner's salt can name; "": everybody's.
    Raises:
        InvalidRequest: the salt is empty, which hides a mistake: nothing would be kept apart; or
            it is too long.
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
