"""Open files and connections: many more than a program may have where it starts.

The limit is mostly 1024, for the sake of old programs that sleep with select, which knows no more.
Ours sleep with poll and epoll. Knows nothing of what they are opened for.
"""

import resource

ENOUGH = 1 << 16


def allow_many() -> None:
    """Raises this process's limit to ENOUGH, or as far as the system lets it, and never lowers it.
    Processes that it starts from now on inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
