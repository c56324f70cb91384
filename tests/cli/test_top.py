"""`baton top`: its frames as text, and the program with a real router."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from cli.top import __main__ as top
from cli.top import frame as top_frame
from cli.top.frame import Rates
from common.identity.secret import new_secret
from protos.router_pb2 import (
    ClusterNode,
    GetClusterResponse,
    LatencySummary,
    LinkMember,
    LinkState,
    ModelState,
    RankState,
    RecentRequests,
    RouterState,
)
from tests.support.processes import fork_server
from tests.support.processes.programs import Program

PREFILL, DECODE = "10.0.0.5:50100", "10.0.0.7:50200"
WAIT_S = 180.0


def node(role, address, at_s, **fields):
    return ClusterNode(
        role=role,
        address=address,
        **{"state": "ready", "instance_id": 1, "seen_s": at_s, "steps": int(50 * at_s), **fields},
    )


def cluster(at_s, *more, router=None):
    """Return two nodes and a link. The decode node generates 400 tokens a second."""
    pages = {"free": 400, "request": 50, "read": 10, "cache": 40}
    return GetClusterResponse(
        router=RouterState(
            state="ready",
            model="tiny",
            uptime_s=4000 + at_s,
            live_requests=3,
            max_requests=1024,
            **(router or {}),
        ),
        nodes=[
            node("prefill", PREFILL, at_s, counters={"prompt_tokens": int(12_300 * at_s)}),
            node(
                "decode",
                DECODE,
                at_s,
                pages=pages,
                queues={"waiting": 0, "transfer": 2},
                counters={"generated_tokens": int(400 * at_s), "handoffs_completed": int(5 * at_s)},
                links=[LinkState(peer=PREFILL, path="cma", gib_per_s=7.0)],
            ),
            *more,
        ],
    )


def lines(width, height=None, *, answers=(0.0, 2.0), make=cluster, paper=None):
    """Return the lines printed on `paper` cells. The default is the width of the frame."""
    rates = Rates()
    for at_s in answers:
        now = make(at_s)
        rates.take(now.nodes)
    console = Console(width=paper or width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(top_frame.frame("r:1", now, rates, width=width, height=height))
    return console.export_text().splitlines()


def test_a_wide_frame_has_one_line_for_each_node():
    shown = lines(150)
    (decode,) = [line for line in shown if line.startswith(DECODE)]
    *_, bar, used, tokens, prompt, steps, handoffs, queue, number = decode.split()
    assert [used, tokens, prompt, steps, handoffs] == ["12%", "400", "0", "50", "5"]
    assert (queue, number) == ("transfer", "2")
    assert [bar.count(sign) for sign in "█▒░·"] == [2, 1, 2, 19]
    assert (
        "tok/s 400" in shown[1] and "prompt/s 12.3k" in shown[1] and "in-flight 3/1024" in shown[1]
    )
    assert any(line.split() == [PREFILL, "→", DECODE, "cma", "7.52"] for line in shown), (
        shown
    )  # GB, not GiB
    assert "up 1 h 6 min" in shown[0]


def test_a_node_of_a_group_shows_its_place_in_the_group():
    def grouped(at_s):
        return cluster(at_s, node("decode", "10.0.0.8:50200", at_s, group="east", group_rank=1))

    (line,) = [line for line in lines(150, make=grouped) if line.startswith("10.0.0.8")]
    assert line.endswith("group east rank 1")


def split(at_s, num_ranks=2):
    """Return the cluster with several ranks in its decode node."""
    now = cluster(at_s)
    ranks = [
        RankState(rank=n, pid=30 + n, device="cpu", memory_bytes=(5 + n) << 20, steps_behind=n)
        for n in range(num_ranks)
    ]
    now.nodes[1].ranks.extend(ranks)
    now.nodes[1].links[0].members.extend(
        LinkMember(rank=n, producer_rank=0, path="tcp", gib_per_s=1.0 + n) for n in range(num_ranks)
    )
    return now


def test_each_rank_has_a_line_and_links_have_the_numbers_of_ranks():
    shown = lines(150, make=split)
    title = next(line for line in shown if line.startswith("ranks"))
    first = shown[shown.index(title) + 1].split()
    assert first == [DECODE, "0", "30", "cpu", "5.0", "MiB", "0"]
    assert shown[shown.index(title) + 2].split() == [DECODE, "1", "31", "cpu", "6.0", "MiB", "1"]
    (link,) = [line for line in shown if "→" in line and "cma" in line]
    assert link.startswith(f"{PREFILL} → {DECODE} (1 → 2 ranks)")
    first, second = shown[shown.index(link) + 1 :][:2]
    assert first.split() == ["rank", "0", "→", "rank", "0", "tcp", "1.07"]
    assert second.split() == ["rank", "0", "→", "rank", "1", "tcp", "2.15"]
    assert not any("rank" in line for line in lines(150))


def test_members_of_links_are_shown_only_if_all_fit():
    shown = lines(150, 24, make=lambda at_s: split(at_s, num_ranks=32))
    assert len(shown) <= 24
    assert any(line.startswith(f"{PREFILL} → {DECODE} (1 → 32 ranks)") for line in shown)
    assert not any("rank 0 → rank" in line for line in shown)


def test_ranks_that_do_not_fit_have_a_line_for_each_node():
    shown = lines(150, 30, make=lambda at_s: split(at_s, num_ranks=32))
    title = next(line for line in shown if line.startswith("ranks"))
    row = shown[shown.index(title) + 1].split("  ")
    assert [cell.strip() for cell in row if cell] == [
        DECODE, "all 32", "cpu", "5.0 MiB … 36.0 MiB", "0 … 31",
    ]  # fmt: skip
    assert len(shown) <= 30
    assert any("cma" in line for line in shown)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("num_ranks", [2, 32])
def test_no_line_of_ranks_is_wider_than_the_terminal(width, num_ranks):
    shown = lines(width, 30, make=lambda at_s: split(at_s, num_ranks), paper=500)
    title = next(line for line in shown if line.startswith("ranks"))
    assert max(map(len, shown[shown.index(title) :])) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    shown = lines(width)
    assert max(map(len, shown)) <= width
    assert any(line.startswith(DECODE[:8]) for line in shown)
    assert any("transfer 2" in line for line in shown)
    nodes = [line for line in lines(width, paper=500) if line.startswith(("10.", "node ", "  "))]
    assert len(nodes) >= 3
    assert max(map(len, nodes)) <= width  # and no line is broken for this


def test_percentiles_rejections_and_errors_of_the_last_minute_have_a_line():
    recent = RecentRequests(
        rejected_requests=3,
        failed_requests=2,
        ttft=LatencySummary(count=9, p50_s=0.039, p99_s=1.14),
    )
    shown = lines(80, make=lambda at_s: cluster(at_s, router={"recent": recent}))
    assert shown[2].split("   ") == [
        "TTFT p50/p99 39/1140 ms",
        "ITL -",
        "rejected (429) 3",
        "errors 2",
    ]


def test_a_router_process_that_does_not_respond_is_reported():
    some = {"processes": 2, "silent_processes": 1}
    shown = lines(150, make=lambda at_s: cluster(at_s, router=some))
    assert "ready, 1 of 2 router processes silent" in shown[0]
    assert not any("silent" in line for line in lines(150))


def test_there_are_no_rates_before_a_second_observation():
    (decode,) = [line for line in lines(150, answers=[1.0]) if line.startswith(DECODE)]
    assert decode.split()[4:8] == ["-"] * 4


def test_counters_of_a_restarted_node_start_at_zero_without_negative_rates():
    def again(at_s):
        now = cluster(at_s)
        if at_s == 4.0:
            now.nodes[1].instance_id = 2
            now.nodes[1].counters["generated_tokens"] = 7
        return now

    (decode,) = [
        line for line in lines(150, answers=[0, 2, 4], make=again) if line.startswith(DECODE)
    ]
    assert decode.split()[4] == "-"


def test_a_node_that_cannot_be_reached_is_shown_without_numbers():
    def gone(at_s):
        return cluster(at_s, node("decode", "10.0.0.8:50200", at_s, state="unreachable"))

    shown = lines(150, make=gone)
    (line,) = [line for line in shown if line.startswith("10.0.0.8")]
    assert line.split()[1] == "unreachable"
    assert set(line.split()[3:]) == {"-"}
    assert "nodes 2/3" in shown[1]


def test_many_links_become_a_line_for_each_path():
    def many(at_s):
        peers = [f"10.0.1.{i}:50100" for i in range(64)]
        links = [LinkState(peer=peer, path="tcp", gib_per_s=1 + i) for i, peer in enumerate(peers)]
        return cluster(at_s, node("decode", "10.0.0.8:50200", at_s, links=links))

    shown = lines(120, 24, make=many)
    assert any(line.split() == ["64", "links", "tcp", "1.07", "…", "68.7"] for line in shown)
    assert len(shown) <= 24


def test_a_node_name_cannot_contain_terminal_commands():
    evil = "\x1b]0;title\x07[bold]x[/bold]"

    def named(at_s):
        return cluster(at_s, node("decode", evil, at_s, state=evil), router={"reason": evil})

    text = "\n".join(lines(200, make=named))
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]x[/bold]" in text


# The process --------------------------------------------------------------------------------------


@pytest.fixture
def router(tmp_path):
    """A router whose nodes do not exist."""
    from tests.api.models import write_model

    flags = ["--prefill=127.0.0.1:1", "--decode=127.0.0.1:2", "--http-port=0", "--port=0"]
    program = Program("router", f"--model={write_model(tmp_path)}", *flags)
    yield program
    program.close()


def _environment():
    return {**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""}


def _once(*arguments, directory=None):
    """Return the exit code and the output of the command."""
    flags = ("--once", "--interval=0.1", *arguments)
    done = fork_server.run("cli.top", *flags, environment=_environment(), directory=directory)
    return done.returncode, done.stdout


def test_once_prints_a_frame_without_colours_and_exits_with_0(router):
    code, said = _once(f"--router={router.address()}")
    assert code == 0
    assert "\x1b" not in said
    assert said.startswith(f"baton top  {router.address()} not ready: no decode node")
    assert said.count("unreachable") == 2


# Seen failing with only the API key: the secret is not sent.
def test_an_operator_needs_no_api_key(tmp_path):
    from tests.api.models import write_model

    secret, keys = tmp_path / "secret", tmp_path / "keys.yaml"
    secret.write_text(new_secret())
    keys.write_text(fork_server.run("cli.main", "api-key", "alice").stdout)
    flags = [f"--model={write_model(tmp_path)}", "--prefill=127.0.0.1:1", "--decode=127.0.0.1:2"]
    flags += ["--http-port=0", "--port=0", f"--secret-file={secret}", f"--api-keys={keys}"]
    router = Program("router", *flags)
    try:
        for given, code in (((), top.EXIT_NO_ANSWER), ((f"--secret-file={secret}",), 0)):
            assert _once(f"--router={router.address()}", *given, directory=tmp_path)[0] == code
    finally:
        router.close()


class Screen:
    """A terminal with `baton top` in it."""

    def __init__(self, *arguments):
        self._end, end = pty.openpty()
        self.resize(100, 30)
        self.manners = termios.tcgetattr(self._end)
        self.program = fork_server.start(
            "cli.top", arguments, _environment(), Path.cwd(), (end, end, end)
        )
        os.close(end)
        self.text = ""

    def resize(self, width, height):
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))

    def type(self, keys):
        os.write(self._end, keys)

    def until(self, words):
        """Discard the output up to and including `words`."""
        deadline = time.monotonic() + WAIT_S
        os.set_blocking(self._end, False)
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in {self.text!r}"
            with contextlib.suppress(BlockingIOError):
                self.text += os.read(self._end, 1 << 16).decode(errors="replace")
            time.sleep(0.01)
        self.text = self.text.partition(words)[2]

    def close(self):
        self.program.kill()
        self.program.wait()
        os.close(self._end)


@pytest.fixture
def screens():
    opened = []

    def open_one(*arguments):
        opened.append(Screen(*arguments))
        return opened[-1]

    yield open_one
    for screen in opened:
        screen.close()


def test_in_a_terminal_it_survives_the_loss_of_its_router_until_q(router, screens):
    address = router.address()
    screen = screens("--interval=0.1", f"--router={address}")
    screen.until("unreachable")
    assert termios.tcgetattr(screen._end)[3] & termios.ECHO == 0
    screen.resize(60, 20)
    screen.program.send_signal(signal.SIGWINCH)
    screen.until("baton top")
    router.close()
    screen.until("Retrying. no router responds")
    screen.type(b"q")
    assert screen.program.wait(WAIT_S) == 0
    screen.until("\x1b[?1049l")  # the terminal shows its previous content again
    assert termios.tcgetattr(screen._end)[3] == screen.manners[3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_0(router, screens, number):
    screen = screens(f"--router={router.address()}")
    screen.until("unreachable")
    screen.program.send_signal(number)
    assert screen.program.wait(WAIT_S) == 0


def test_without_a_terminal_it_prints_frame_after_frame(router):
    flags = ["--interval=0.1", f"--router={router.address()}"]
    command = [sys.executable, "-m", "cli.top", *flags]  # its interpreter must end cleanly, too
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=_environment(), **pipes) as program:
        frames = 0
        for line in program.stdout:
            frames += line.startswith("baton top")
            if frames == 3:
                break
        program.stdout.close()  # as `head` does
        program.wait(WAIT_S)
        assert program.stderr.read() == ""


def test_several_models_have_separate_lines_and_nodes():
    models = [
        ModelState(name="large", state="ready", live_requests=1, max_requests=8),
        ModelState(name="small", state="not ready", reason="no decode node", max_requests=8),
    ]
    reported = cluster(1.0, router={"models": models})
    for each in reported.nodes:
        each.served_model = "large" if each.role == "decode" else "small"
    text = "\n".join(lines(120, answers=(1.0,), make=lambda _: reported))
    assert "small not ready: no decode node  in-flight 0/8" in text
    assert text.index("large decode") < text.index(DECODE)
    assert text.index("small prefill") < text.index(PREFILL)
