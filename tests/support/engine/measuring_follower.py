"""A follower on a CPU that reports memory measurements like a GPU's, with made-up values.

`python -m tests.support.engine.measuring_follower DESCRIPTOR,...`
"""

import sys
from unittest import mock

from engine import build, follower, load
from engine.adapters.adapters import AdapterBank
from engine.footprint import MemoryFootprint
from engine.models import Model
from engine.ranks import Stage
from engine.sizing import EngineShape
from node.follower import open_transfer

FREE_BYTES = 3 << 30


def measured(
    model: Model,
    shape: EngineShape,
    bank: AdapterBank,
    *,
    max_running: int,
    max_drafts: int,
    graphs: bool,
    stage: Stage | None,
) -> MemoryFootprint:
    return MemoryFootprint(shape.prefill_tokens, max_running, int(graphs))


if __name__ == "__main__":
    with (
        mock.patch.object(load, "free_bytes", return_value=FREE_BYTES),
        mock.patch.object(build, "measure_footprint", measured),
    ):
        follower.main([int(each) for each in sys.argv[1].split(",")], open_transfer)
