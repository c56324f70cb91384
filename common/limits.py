"""Protocol version and message limits of the Serve stream between routers and decode nodes.

Each end sends its version in its first message. Unknown fields and kinds of messages from a newer
end are ignored. The version changes when ignoring them would be wrong.
"""

VERSION = 5
FIRST_MESSAGE_S = 10.0  # seconds for a router to send the first message of a stream

# Limits of one message to a node: at most 12 MB, with 5 bytes per token and 20 KB for the rest of a
# Submit. Bytes of images count like tokens, unless the message has a single Submit.
MAX_SUBMITS = 256
MAX_TOKENS = 1 << 20
MAX_CANCELS = 4096
MAX_PEERS = 1024
# Limits of one Submit.
MAX_CANDIDATES = 64
MAX_IMAGES = 64  # including temporal patches of videos
MAX_FRAMES = 2 * MAX_IMAGES  # in all videos together
MAX_STREAM_INTERVAL = 1024  # tokens
MIN_WEIGHT, MAX_WEIGHT = 0.1, 10.0  # fair-share weight of a request's client
MAX_PIXEL_BYTES = 6 << 20  # in all images together
MAX_EMBEDDING_BYTES = 4 << 20  # input embeddings
# Rows in each column of one Step: many times the requests that a node can have.
MAX_ROWS = 1 << 16
MAX_LINKS = 4096  # in one Status
MAX_ADAPTERS = 4096  # in one Status
MAX_FINGERPRINT = 64  # characters

LOWEST, HIGHEST = -100, 100  # priorities of a request
MAX_RANKS = 256  # of one node: tensor-parallel ranks x stages


def difference(*, node: int, router: int) -> str:
    """Return why ends with these versions cannot communicate, or "". 0: no version was sent."""
    if node == router:
        return ""
    return f"the decode node speaks version {node} of Serve, the router version {router}"
