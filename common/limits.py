"""What both ends of Serve keep to: its version, and how much one message may say.

Each end tells its version in its first message. What a newer end says besides, in fields or kinds
of messages that this one does not know, is ignored: the version changes where that would be wrong.
"""

VERSION = 5
FIRST_MESSAGE_S = 10.0  # for a router, from opening the stream

# Of one message to a node: 12 MB at most, 5 bytes for a token and 20 KB for all else of a Submit.
# Bytes of images count as tokens do, unless the message has a single Submit.
MAX_SUBMITS = 256
MAX_TOKENS = 1 << 20
MAX_CANCELS = 4096
MAX_PEERS = 1024
# Of one Submit.
MAX_CANDIDATES = 64
MAX_IMAGES = 64
MIN_WEIGHT, MAX_WEIGHT = 0.1, 10.0  # of its client
MAX_PIXEL_BYTES = 6 << 20  # of all of them
# Of one Step, in each of its columns: many times the requests that a node can have.
MAX_ROWS = 1 << 16
MAX_LINKS = 4096  # of one Status
MAX_ADAPTERS = 4096  # likewise


def difference(*, node: int, router: int) -> str:
    """Why two ends of these versions do not speak; "" if they do. 0: it has told none."""
    if node == router:
        return ""
    return f"the decode node speaks version {node} of Serve, the router version {router}"
