"""A follower that sends unexpected replies before and after the reply to each job.

`python -m tests.support.engine.repeating_follower DESCRIPTOR`
"""

import os
import socket
import sys
from typing import Any

import msgspec

from engine.ranks.messages import (
    MAX_PACKET_BYTES,
    JobDone,
    Ping,
    RankJob,
    RankLoaded,
    RankReport,
)

if __name__ == "__main__":
    rank0 = socket.socket(fileno=int(sys.argv[1].split(",")[0]))
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ping | RankJob)
    encoder = msgspec.msgpack.Encoder()
    rank0.recv(MAX_PACKET_BYTES)  # StartRank
    rank0.send(encoder.encode(RankLoaded(1, os.getpid(), {})))
    while packet := rank0.recv(MAX_PACKET_BYTES):
        match decoder.decode(packet):
            case Ping():
                rank0.send(encoder.encode(RankReport(0, 0)))
            case RankJob(number=number):
                for each in (number + 1000, number, number):
                    rank0.send(encoder.encode(JobDone(each)))
