"""Faults of nodes while two models answer questions with images, and with schemas under drafts."""

import base64
import io
import json
import os
import random
import secrets
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image as Pillow
import pytest

from cli.demo_model import write
from tests.support.cluster import free_ports, free_row
from tests.support.programs import Program
from tests.support.vision import make_vision_checkpoint

WAIT_S = 180.0
CLIENTS = 4
FAULTS = 20
FREEZE_S = 3.0
NUM_NODES = 6
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 6},
        "number": {"type": "integer"},
        "right": {"type": "boolean"},
    },
    "required": ["names", "number", "right"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}}


class System:
    """`baton up` with a prefill and decode pair of a model with images, twice, and two colocated
    nodes of the demo model. It restarts nodes that end."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def nodes(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._url}/cluster", timeout=WAIT_S) as answer:
            nodes: list[dict[str, Any]] = json.load(answer)["nodes"]
        return nodes

    def until_well(self, ended: int | None) -> None:
        """Wait until all nodes are ready. The process `ended` belongs to none of them."""
        deadline = time.monotonic() + WAIT_S
        while True:
            nodes = self.nodes()
            ready = len(nodes) == NUM_NODES and all(each["state"] == "ready" for each in nodes)
            if ready and not any(ended in each["pids"] for each in nodes):
                return
            assert time.monotonic() < deadline, nodes
            time.sleep(0.2)

    def answer(self, question: dict[str, Any]) -> str:
        body = {"temperature": 0, "max_tokens": 60, **question}
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            text: str = json.load(response)["choices"][0]["message"]["content"]
        return text


@contextmanager
def running(directory: Path) -> Iterator[System]:
    write(directory / "demo")
    make_vision_checkpoint(directory / "images")
    router, http, prefill = free_ports(3)
    up = Program(
        "cli.up",
        *(f"--model={directory / name}" for name in ("images", "demo")),
        *(f"--served-model-name={name}" for name in ("images", "demo")),
        *("--prefill=2", "--prefill=0", "--decode=2", "--decode=2"),
        f"--var={directory / 'var'}",
        f"--port={router}",
        f"--http-port={http}",
        f"--prefill-port={prefill}",
        f"--decode-port={free_row(4)[0]}",
        "--device=cpu",
        "--dtype=float32",
        "--engine.cache.num-pages=128",
        "--engine.speculative.method=ngram",
    )
    try:
        up.line_with("Ready.", WAIT_S)
        yield System(http)
    finally:
        up.close()


def questions() -> list[dict[str, Any]]:
    """Return questions to both models, with and without images and schemas."""
    asked = []
    for seed in range(6):
        noise = np.random.default_rng(seed).integers(0, 256, (45, 70, 3), np.uint8)
        file = io.BytesIO()
        Pillow.fromarray(noise).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": f"What is in picture {seed}? "}, image]
        for model, said in (("images", content), ("demo", f"add {20 + seed} 15 =")):
            messages = [{"role": "user", "content": said}]
            plain = {"model": model, "messages": messages, "ignore_eos": True}
            forced = {"model": model, "messages": messages, "response_format": FORMAT}
            asked += [plain, forced]
    return asked


def befall(system: System, draw: random.Random) -> None:
    """Kill or freeze a process of a node, and wait until all nodes are ready again."""
    pid = draw.choice(draw.choice(system.nodes())["pids"][:2])
    if draw.random() < 0.3:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(FREEZE_S)  # this is what happens, not a wait for something
        os.kill(pid, signal.SIGCONT)
        system.until_well(None)
    else:
        os.kill(pid, signal.SIGKILL)
        system.until_well(pid)


def ask_while(going: Callable[[], bool], system: System, known: list[str], seed: int) -> int:
    """Ask random questions one after the other. Return the number of right responses."""
    draw, asked, right = random.Random(seed), questions(), 0
    while going():
        number = draw.randrange(len(asked))
        found = system.answer(asked[number])
        assert found == known[number], f"question {number}: {found!r}, not {known[number]!r}"
        right += 1
    return right


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_response_of_two_models_is_lost_or_wrong(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, over = random.Random(seed), threading.Event()
    with running(tmp_path) as system, ThreadPoolExecutor(CLIENTS) as pool:
        known = [system.answer(each) for each in questions()]
        assert len(set(known)) > len(known) // 3
        asking = [
            pool.submit(
                ask_while, lambda: not over.is_set(), system, known, draw.randrange(1 << 32)
            )
            for _ in range(CLIENTS)
        ]
        try:
            for _ in range(FAULTS):
                befall(system, draw)
                assert not any(each.done() for each in asking), [e.exception() for e in asking]
        finally:
            over.set()
        right = sum(each.result() for each in asking)
    print(f"{right} right responses")
    assert right > FAULTS
