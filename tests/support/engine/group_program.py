"""One node of a test's data-parallel group, as a separate process.

`python -m tests.support.engine.group_program DIRECTORY RANK SIZE TIMEOUT_S` joins, prints "joined",
and begins a step for each line of stdin: "work" or "drain". It prints the error that ends it, or
"drained". After one more line it prints whether it still detects the end of others.
"""

import os
import select
import sys
from pathlib import Path

from common.config import ParallelConfig
from common.errors import ServingError
from engine.ranks.lockstep import Announcement, Lockstep, ShutdownStage
from engine.ranks.node_group import join_group


def serve(lockstep: Lockstep, wake: int) -> None:
    """Begin a step for each input line, until the group is drained."""
    poll = select.poll()
    for descriptor in (0, wake, lockstep.ended):
        poll.register(descriptor, select.POLLIN)
    own = Announcement()
    while not lockstep.is_drained:
        steps = lockstep.meet(own)
        if steps:
            print(f"step {[each.num_tokens for each in lockstep.announcements]}", flush=True)
        own = Announcement(stage=own.stage)
        ready = dict(poll.poll(0 if steps or lockstep.is_drained else None))
        if wake in ready:
            os.eventfd_read(wake)
        if 0 in ready:
            line = os.read(0, 64)
            works = line == b"work\n"
            own = (
                Announcement(1, launches=True)
                if works
                else Announcement(stage=ShutdownStage.DRAINED)
            )
    print("drained", flush=True)
    os.read(0, 64)
    ended, _, _ = select.select([lockstep.ended], [], [], 0)
    print(f"others have ended: {bool(ended)}", flush=True)


def main(directory: str, rank: str, size: str, timeout_s: str) -> None:
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    config = ParallelConfig(
        dp=int(size), dp_rank=int(rank), dp_group=Path(directory), collective_s=float(timeout_s)
    )
    try:
        group = join_group(config, "equal", wake)
        print("joined", flush=True)
        serve(group.lockstep, wake)
    except ServingError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
