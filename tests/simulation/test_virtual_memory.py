"""Windows, states, drafts, swaps and offload tiers in virtual time: every token is right."""

from pathlib import Path
from typing import Any

import pytest

from tests.simulation.test_virtual import simulate

DRAFTS = {"engine.speculative.method": "ngram"}
TIER = {"engine.offload.cpu_bytes": 2_000_000_000}
SHORT_OF_PAGES = {"engine.scheduler.retract_every": 7, "engine.cache.num_pages": 1100}


def report(directory: Path, cluster: dict[str, Any], options: dict[str, Any]) -> Any:
    """Run 30 requests on H100s."""
    load = {"rate": 6, "input": [600, 1500], "output": 40, "prefixes": 8, "requests": 30}
    nodes = {"gpu": "h100", "options": options, **cluster}
    return simulate(directory, cluster=nodes, load=load)


@pytest.mark.long
@pytest.mark.parametrize(
    "cluster, options",
    [
        ({"model": "gemma-3-12b", "colocated": 1}, DRAFTS | TIER | SHORT_OF_PAGES),
        ({"model": "gemma-3-12b", "prefill": 1, "decode": 2}, DRAFTS),
        (
            {"model": "qwen3-next-80b-a3b", "prefill": 1, "decode": 1}
            | {"prefill_tp": 4, "decode_tp": 4},
            DRAFTS | TIER | SHORT_OF_PAGES | {"engine.cache.num_pages": 3000},
        ),
    ],
)
def test_all_memory_together_gives_right_responses(
    tmp_path: Path, cluster: dict[str, Any], options: dict[str, Any]
) -> None:
    found = report(tmp_path, cluster, options)
    assert (found["right"], found["errors"], found["violations"]) == (30, {}, [])


@pytest.mark.long
def test_drafts_save_steps_as_often_as_they_are_accepted(tmp_path: Path) -> None:
    nodes = {"model": "llama-3-8b", "colocated": 1}
    tpot = {
        share: report(tmp_path, nodes, DRAFTS | {"engine.sim.draft_acceptance": share})["tpot"]
        for share in (0.0, 0.5, 0.9)
    }
    plain = report(tmp_path, nodes, {})["tpot"]["mean"]
    means = [each["mean"] / plain for each in tpot.values()]
    assert means[0] == pytest.approx(1, abs=0.05)
    assert 0.2 < means[2] < 0.5 < means[1] < 0.9
