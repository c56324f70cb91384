"""`baton bench` as a user calls it, with stub servers, and once with whole systems."""

import asyncio
import contextlib
import json
import os
import signal

import pytest

from bench.__main__ import parse
from bench.commands.command import run as run_command
from bench.systems import Machine, Serving
from cli.demo_model import write
from tests.bench.pages import Page
from tests.bench.stub_openai import Script, stub_openai
from tests.support.processes import fork_server
from tests.support.processes.programs import runs
from tests.support.refusals import refusal

WAIT_S = 500.0  # systems start and are measured on a busy machine


class Bench:
    """One `baton bench ...` in its own directory."""

    def __init__(self, directory, arguments):
        self._output, self._errors = directory / "stdout", directory / "stderr"
        with (
            open(os.devnull, "rb") as nothing,
            self._output.open("wb") as output,
            self._errors.open("wb") as errors,
        ):
            files = (nothing.fileno(), output.fileno(), errors.fileno())
            environment = {**os.environ, "PATH": ""}
            self.process = fork_server.start("bench", arguments, environment, directory, files)

    @property
    def errors(self):
        """Return the text that the process has written to standard error."""
        return self._errors.read_text()

    async def ended(self):
        """Return its exit code and the JSON of the last line of standard output."""
        code = await asyncio.to_thread(self.process.wait, WAIT_S)
        assert "Traceback" not in self.errors, self.errors
        lines = self._output.read_text().splitlines()
        return code, json.loads(lines[-1]) if lines else None


@pytest.fixture
async def bench(tmp_path):
    started = []

    def start(*arguments):
        started.append(Bench(tmp_path, arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


LOAD = ("load", "--prompt-tokens=20", "--output-tokens=3", "--warm-up=2", "--json=raw.json")


async def test_load_reports_the_behaviour_of_the_server(bench, tmp_path):
    script = Script(chunks=(1, 1, 1), first_s=0.02, gap_s=0.01)
    async with stub_openai(lambda _: script) as stub:
        flags = ("--rate=20,40", "--requests=12", "--goodput=ttft=30,itl=30")
        run = bench(*LOAD, *flags, f"--url={stub.url}")
        code, said = await run.ended()
    assert (code, said["complete"], said["bench"]) == (0, True, "load")
    assert len(stub.seen) == 2 + 12 + 12
    assert {len(seen.body["prompt"]) for seen in stub.seen} == {20}
    for row, rate in zip(said["summary"]["runs"], (20.0, 40.0), strict=True):
        assert (row["x"], row["requests"], row["completed"], row["errors"]) == (rate, 12, 12, {})
        assert (row["ttft"]["n"], row["itl"]["n"]) == (12, 24)
        assert row["ttft"]["p50"] >= 0.02
        assert row["goodput"]["share"] == 1.0
    page = Page(tmp_path / "baton-bench-load.html")
    assert {"20 requests/s", "40 requests/s"} <= set(page.cells)
    shown = f"{said['summary']['runs'][0]['ttft']['p50'] * 1e3:.3g}"
    assert shown in page.cells
    assert page.num_points() >= 24
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert [len(one["outcomes"]) for one in raw["runs"]] == [12, 12]
    assert all(len(o["chunks"]) == 3 for one in raw["runs"] for o in one["outcomes"])
    assert raw["configuration"]["rate"] == [20.0, 40.0]
    assert raw["machine"]["cores"] >= 1


async def test_a_trace_sets_lengths_and_times(bench, tmp_path):
    lines = [(0, 30, 1), (150, 20, 2), (300, 25, 3)]
    (tmp_path / "trace").write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": prompt, "output_length": output})
            for at, prompt, output in lines
        )
    )
    async with stub_openai(lambda _: Script()) as stub:
        flags = ("--trace=trace", "--warm-up=0", "--json=raw.json", f"--url={stub.url}")
        run = bench("load", *flags)
        code, said = await run.ended()
    assert (code, said["summary"]["runs"][0]["completed"]) == (0, 3)
    assert [len(seen.body["prompt"]) for seen in stub.seen] == [30, 20, 25]
    assert [seen.body["max_tokens"] for seen in stub.seen] == [1, 2, 3]
    (raw,) = json.loads((tmp_path / "raw.json").read_text())["runs"]
    assert [outcome["due"] for outcome in raw["outcomes"]] == pytest.approx([0.0, 0.15, 0.3])
    assert all(outcome["sent"] >= outcome["due"] for outcome in raw["outcomes"])


async def test_a_server_that_fails_during_a_run_causes_errors_in_the_report(bench, tmp_path):
    async with stub_openai(lambda n: Script() if n < 6 else Script(cut=True)) as stub:
        run = bench(*LOAD, "--concurrency=2", "--requests=10", f"--url={stub.url}")
        code, said = await run.ended()
    assert code == 0
    (row,) = said["summary"]["runs"]
    assert (row["completed"], row["errors"]) == (4, {"cut off": 6})
    assert "6 x cut off" in Page(tmp_path / "baton-bench-load.html").text
    assert "6 x cut off" in run.errors


async def test_an_interrupted_run_reports_its_results_so_far(bench, tmp_path):
    enough = asyncio.Event()

    def script(number):
        if number == 9:  # both callers wait by now
            enough.set()
        return Script() if number < 8 else Script(first_s=60.0)

    async with stub_openai(script) as stub:
        run = bench(*LOAD, "--concurrency=2", f"--url={stub.url}")
        await enough.wait()
        run.process.send_signal(signal.SIGINT)
        code, said = await run.ended()
    assert (code, said["complete"]) == (130, False)
    assert said["summary"]["runs"][0]["completed"] == 6
    assert "Interrupted" in Page(tmp_path / "baton-bench-load.html").text


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "COMMAND"),
        (("load",), "--rate"),
        (("load", "--rate=0"), "--rate"),
        (("load", "--rate=1", "--concurrency=1"), "choose"),
        (("load", "--rate=1", "--prompt-tokens=x"), "'x' is not a length"),
        (("load", "--rate=1", "--goodput=speed=1"), "speed=1"),
        (("load", "--rate=1", "--prefix-groups=2"), "--prefix-tokens"),
        (("load", "--rate=1", "--trace=missing"), "missing"),
        (("load", "--rate=1", "--html=no/such/place"), "no/such/place"),
        (("load", "--rate=1", "--nonsense"), "--nonsense"),
        (("load", "--rate=1", "--url=here"), "'here'"),
        (("compare",), "--model"),
        (("compare", "--model=/no/such"), "/no/such"),
        (("compare", "--model=/", "--rate=2,-1"), "above 0"),
        (("break-even", "--model=/", "--load=2"), "--load"),
    ],
)
def test_invalid_input_is_reported_in_one_line(capsys, arguments, words):
    assert words in refusal(capsys, lambda: parse(arguments))


async def test_an_unreachable_server_is_reported_in_one_line(bench):
    run = bench("load", "--rate=1", "--url=http://127.0.0.1:1")
    assert await run.ended() == (1, None)
    (line,) = run.errors.splitlines()
    assert line == "baton bench load: http://127.0.0.1:1/v1/models: Connection refused"


async def test_a_load_over_the_limits_of_the_model_is_rejected(bench):
    async with stub_openai(lambda _: Script()) as stub:
        run = bench("load", "--rate=1", "--prompt-tokens=20000", f"--url={stub.url}")
        assert await run.ended() == (2, None)
    assert "10000 tokens" in run.errors
    assert stub.seen == []


@pytest.fixture
def tiny(tmp_path):
    """Return flags of a benchmark that starts systems."""
    model = tmp_path / "model"
    write(model)
    return (f"--model={model}", "--device=cpu", "--repeats=1", "--engine.cache.num-pages=64")


@pytest.mark.long  # without nodes: tests/bench/test_comparisons.py
async def test_compare_measures_systems_that_it_starts_and_stops(bench, tiny, tmp_path):
    work = ("--prompt-tokens=mix:16=1,64=1", "--output-tokens=4", "--long-tokens=64")
    run = bench("compare", *tiny, *work, "--rate=12", "--duration=1", "--goodput=ttft=60")
    code, said = await run.ended()
    assert code == 0, run.errors
    (row,) = said["summary"]["rows"]
    assert row["goodput"]["colocated"] > 0.0 < row["goodput"]["disaggregated"]
    assert row["ttft_p50"]["to_colocated"]["mean"] == pytest.approx(
        row["ttft_p50"]["disaggregated"] / row["ttft_p50"]["colocated"], rel=1e-3
    )
    assert row["ttft_p50"]["to_colocated"]["verdict"] == "undecided"  # of one repeat
    page = Page(tmp_path / "baton-bench-compare.html")
    assert "1 prefill + 1 decode" in page.text and "2 colocated" in page.text


SWEEP = ("--prompt-tokens=16,64", "--duration=0.4", "--streams=2", "--stream-output-tokens=8")


def _assert_swept(said, tmp_path):
    """Check the output and the files of break-even for SWEEP."""
    assert said["summary"]["break_even"]["by"] == "probe_ttft_p50"
    assert said["summary"]["shared_cores"] >= 1
    assert "Prefill and decode share" in Page(tmp_path / "baton-bench-break-even.html").text
    assert said["summary"]["local_prefill_max_tokens"]["advice"] in (0, 16, 64)
    assert [row["prompt_tokens"] for row in said["summary"]["rows"]] == [16, 64]
    assert "too few repeats" in Page(tmp_path / "baton-bench-break-even.html").text
    runs = json.loads((tmp_path / "raw.json").read_text())["runs"]
    assert {one["system"] for one in runs} == {"colocated", "disaggregated", "local"}
    for one in runs:
        assert one["summary"]["errors"] == {}
        probes = [o for o in one["outcomes"] if o["group"] == "probe"]
        assert {o["prompt_tokens"] for o in probes} == ({one["x"]} if one["x"] else set())


async def test_break_even_sweeps_three_systems_with_the_same_probes(
    tiny, tmp_path, monkeypatch, capsys
):
    arms = []

    @contextlib.asynccontextmanager
    async def serving(machine, arm):
        arms.append(arm)
        yield Serving(stub.url)

    monkeypatch.setattr(Machine, "serving", serving)
    monkeypatch.chdir(tmp_path)
    async with stub_openai(lambda _: Script(first_s=0.02)) as stub:
        assert await run_command(*parse(["break-even", *tiny, *SWEEP, "--json=raw.json"])) == 0
    _assert_swept(json.loads(capsys.readouterr().out.splitlines()[-1]), tmp_path)
    flags = {arm.name: " ".join(arm.decode_flags) for arm in arms}
    assert flags["disaggregated"].endswith("local-prefill-max-tokens=0")
    assert flags["local"].endswith("local-prefill-max-tokens=1073741824")
    assert "local-prefill-max-tokens" not in flags["colocated"]


@pytest.mark.long
async def test_break_even_measures_systems_that_it_starts_and_stops(bench, tiny, tmp_path):
    run = bench("break-even", *tiny, *SWEEP, "--json=raw.json")
    code, said = await run.ended()
    assert code == 0, run.errors
    _assert_swept(said, tmp_path)


async def test_an_interrupt_during_the_start_of_a_system_leaves_no_process(bench, tiny):
    run = bench("compare", *tiny, "--rate=1")
    async with asyncio.timeout(WAIT_S):
        while "starting colocated" not in run.errors:  # noqa: ASYNC110  (it is another process)
            await asyncio.sleep(0.01)
        while len(children := _programs(run.process.pid)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    code, said = await run.ended()
    assert (code, said["complete"], said["summary"]["rows"]) == (130, False, [])
    assert not any(runs(pid) for pid in children)


def _programs(pid):
    """Return every process below `pid`."""
    below = fork_server.programs_below(pid)
    return [*below, *(each for child in below for each in _programs(child))]
