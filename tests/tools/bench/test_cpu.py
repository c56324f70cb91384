"""tools/bench/cpu: figures computed from rounds, the order of systems, and one small run."""

import contextlib
import json
import subprocess
import sys

import pytest

from tools.bench.cpu import figures, floor, in_process
from tools.bench.cpu.figures import Figure, RoundTable
from tools.bench.cpu.floor import Floor
from tools.bench.cpu.systems_in_turns import LeftOut, StreamLoad, measured
from tools.bench.support.models import QWEN3_450M

FLOOR = Floor(2e9, 1e12)


def test_a_figure_is_judged_by_its_median_and_has_its_worst_round():
    gap = Figure("gap", [1.2, 1.1, 1.4], "low", 1.25)
    assert (gap.middle, gap.worst, gap.reached) == (1.2, 1.4, True)
    rate = Figure("rate", [1.2, 1.0, 1.05], "high", 1.1)
    assert (rate.middle, rate.worst, rate.reached) == (1.05, 1.0, False)
    assert Figure("beside", [1.0], "low").reached is None


def test_a_figure_that_was_not_measured_says_why():
    note = "llama.cpp: no --llama-python was given"
    record = Figure("c", [], "high", 2.0, note).record()
    assert (record["median"], record["reached"], record["note"]) == (None, None, note)
    assert Figure("b", [0.5], "high", 1.0).record()["reached"] is False


def test_ratios_are_within_a_round_and_relative_to_its_best_peer():
    ours, peers = [2.0, 4.0], [[1.0, 8.0], [4.0, 2.0]]
    assert figures.best(peers, "low") == [1.0, 2.0]
    assert figures.best([[], peers[1]], "high") == peers[1]
    assert figures.ratios(ours, figures.best(peers, "low")) == [2.0, 2.0]
    assert figures.ratios(ours, []) == []


def test_growth_is_one_if_the_bytes_explain_it():
    assert figures.growth([14.0, 28.0], [1.0, 1.0], 28e9, 2e9) == [1.0, 2.0]


def test_a_lower_bound_is_bytes_over_bandwidth_and_products_over_their_rate():
    assert FLOOR.step_s(1_000_000_000) == 0.5
    layer = (2048 + 2 * 1024) * 1024 + 1024 * 2048 + 2 * 3072 * 1024 + 1024 * 3072
    assert floor.product_flops(QWEN3_450M, 256) == 2 * 256 * 28 * layer
    assert FLOOR.product_s(floor.product_flops(QWEN3_450M, 256)) == pytest.approx(0.2255, 1e-3)
    assert floor.kv_bytes_per_token(QWEN3_450M, 2) == 28 * 2 * 8 * 128 * 2


def test_the_rates_of_the_machine_are_measured():
    found = floor.measured(1 << 22, QWEN3_450M | {"num_hidden_layers": 1, "hidden_size": 64})
    assert found.read_bytes_per_s > 0 < found.product_flops_per_s


def test_prompts_share_no_prefix_unless_their_workload_says_so():
    plain = StreamLoad("plain", 2, 4, 40, 1)
    assert len({job.prompt[:16] for seed in (1, 2) for job in plain.jobs(5000, seed)}) == 8
    shared = StreamLoad("shared", 4, 4, 40, 1, num_prefixes=2, own_tokens=8)
    jobs = [*shared.jobs(5000, 1), *shared.jobs(5000, 2)]
    assert {len(job.prompt) for job in jobs} == {40}
    assert len({job.prompt for job in jobs}) == 8
    prefixes = {tuple(job.prompt) for job in shared.prefixes(5000)}
    assert {tuple(job.prompt[:32]) for job in jobs} == prefixes and len(prefixes) == 2


class Scripted:
    """A contender that records its calls in `asked`."""

    def __init__(self, name, asked):
        self._name = name
        self._asked = asked

    async def warm_up(self, jobs, streams):
        pass

    async def answers(self, jobs, streams):
        self._asked.append((self._name, tuple(jobs[0].prompt)))
        return {
            "tokens_per_s": 1.0,
            "ttft_ms": {"p50": 1.0},
            "itl_ms": {"p50": 1.0},
            "token_ids": [[1, 2], [3, 4 + (self._name == "b")]],
        }


async def test_systems_alternate_and_one_that_cannot_be_measured_is_reported():
    asked = []

    @contextlib.asynccontextmanager
    async def up(name):
        if name == "c":
            raise LeftOut("there is none")
        yield Scripted(name, asked)

    found = await measured(
        {name: lambda name=name: up(name) for name in "abc"},
        [StreamLoad("load", 1, 1, 8, 1), StreamLoad("longer", 1, 1, 16, 1)],
        vocabulary=5000,
        rounds=2,
        floor=lambda: FLOOR,
    )
    assert [name for name, _ in asked] == list("ababbaba")
    prompts = [prompt for _, prompt in asked]
    assert len({prompt[:8] for prompt in prompts}) == 4, "a round's prompts are its own"
    assert prompts[0] == prompts[1], "and the same for all systems"
    assert found.table.values("a", "load", "tokens_per_s") == [1.0, 1.0]
    assert found.figure("x", [], "low", of=["a", "c"]).note == "c: there is none"
    assert figures.agreement(found.table, "load", "a", "b") == 0.5


def test_medians_and_ranges_of_each_system_are_reported():
    table = RoundTable()
    for gap in (10.0, 30.0, 20.0):
        timed = {"ttft_ms": {"p50": 5.0}, "itl_ms": {"p50": gap}, "tokens_per_s": 8.0}
        table.rows.append({"system": "a", "load": "1 stream", "threads": 2, **timed})
    (row,) = figures.spreads(table)
    assert list(row.values()) == ["1 stream", "a", "2", "8", "5", "20 (10 to 30)"]


def _quick(models, part):
    """Return the last stdout line of a quick run of one part."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.cpu",
        "--quick",
        "--only",
        part,
        "--models",
        models,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_quick_run_measures_a_colocated_node_that_it_starts_and_stops(tmp_path):
    said = _quick(tmp_path, "context")
    assert {row["load"] for row in said["rows"]} == {"8 streams x 32", "4 streams x 64"}
    assert all(figure["median"] > 0 for figure in said["figures"])
    assert len(said["floors"]) == 1 and min(said["floors"][0]) > 0
    assert (tmp_path / "qwen3-small" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_quick_run_measures_delta_nets(tmp_path):
    said = _quick(tmp_path, "delta")
    assert len(said["figures"]) == len(in_process.DELTA_NET_STEPS) and len(said["floors"]) == 1
    assert all(figure["median"] > 0 for figure in said["figures"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_quick_run_compares_baton_with_transformers_and_reports_missing_systems(tmp_path):
    said = _quick(tmp_path, "one")
    figures = {figure["what"]: figure for figure in said["figures"]}
    assert figures["gap between tokens, 1 stream, in floors: default flags"]["median"] > 0
    assert figures["tokens/s, 1 stream: Baton, colocated / transformers"]["median"] > 0
    against_llama = figures["tokens/s, 1 stream: Baton, colocated / llama.cpp bf16"]
    assert against_llama["median"] is None and "--llama-python" in against_llama["note"]
    assert {row["threads"] for row in said["rows"] if row["system"] == "transformers"} <= {1, 2}
