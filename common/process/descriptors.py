"""Limit of open files and connections, raised beyond the default of the system.

The default is mostly 1024, for old programs that use select, which supports no more. Baton uses
poll and epoll.
"""

import resource

ENOUGH = 1 << 16


def allow_many() -> None:
    """Raise this process's limit to ENOUGH, or to the system's maximum. Never lower it.

    Processes started from now on inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
