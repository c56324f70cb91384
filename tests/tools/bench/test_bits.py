"""The circumstances of `tools.bench.bits`, and how it compares responses."""

from pathlib import Path
from random import Random

from common.config import DecodeConfig
from common.settings import read
from tools.bench.bits.circumstances import Circumstances, ComparedKind
from tools.bench.bits.requests import ComparedResponse

LLAMA = ComparedKind("llama", "float32")
SYSTEMS = [Circumstances.of_a_system(Random(number), LLAMA) for number in range(40)]


def test_nodes_accept_the_flags_of_a_system():
    for system in SYSTEMS[:4]:
        flags = ["--model=m", "--engine.batch-invariant", *system.flags(Path("eagle"))]
        config = read(DecodeConfig, "decode", [*flags, *system.decode_flags()])
        assert (config.mode == "colocated") == (system.topology == "colocated")
        assert config.engine.threads == system.threads
        assert bool(config.engine.scheduler.retract_every) == (system.retraction != "none")


def test_every_circumstance_is_drawn_and_can_be_removed():
    drawn = {item for system in SYSTEMS for item in system.with_a_round(Random(1)).differing}
    assert drawn >= {"topology", "chunk", "overlap", "threads", "drafter", "tier", "split_prefill"}
    around = SYSTEMS[0]
    for name in around.differing:
        around = around.without(name)
    assert around == Circumstances()


def test_one_bit_is_a_difference():
    response = ComparedResponse((1, 2, 3), b"\x00\x01", 0, True)
    assert response.difference(response) == ""
    assert (
        response.difference(ComparedResponse((1, 2, 3), b"\x00\x00", 5, True))
        == "log-probabilities"
    )
    assert response.difference(ComparedResponse((1, 7, 3), b"", 0, True)) == "tokens from 1 on"
    assert response.difference(ComparedResponse((1, 2), b"", 0, True)) == "tokens from the end on"
