"""Faults of nodes while two models answer questions with images, and with schemas under drafts.

A model with images has two prefill and two decode nodes, the demo model two colocated nodes. `baton
up` restarts nodes that end.
"""

import json
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cli.demo_model import write
from tests.support.models.vision import make_vision_checkpoint, noise_url
from tests.support.processes.local_system import Router, running, until

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


MODELS = ("images", "demo")
FLAGS = (
    *(f"--served-model-name={name}" for name in MODELS),
    *("--prefill=2", "--prefill=0", "--decode=2", "--decode=2"),
    "--dtype=float32",
    "--engine.speculative.method=ngram",
)


def answer(router: Router, question: dict[str, Any]) -> str:
    response = router.post("/v1/chat/completions", temperature=0, max_tokens=60, **question)
    text: str = json.loads(response)["choices"][0]["message"]["content"]
    return text


def is_well(router: Router, ended: int | None) -> bool:
    """Return whether all nodes are ready, and none has the process `ended`."""
    nodes = router.get("/cluster")["nodes"]
    ready = len(nodes) == NUM_NODES and all(each["state"] == "ready" for each in nodes)
    return ready and not any(ended in each["pids"] for each in nodes)


def questions() -> list[dict[str, Any]]:
    """Return questions to both models, with and without images and schemas."""
    asked = []
    for seed in range(6):
        image = {"type": "image_url", "image_url": {"url": noise_url(seed)}}
        content = [{"type": "text", "text": f"What is in picture {seed}? "}, image]
        for model, said in (("images", content), ("demo", f"add {20 + seed} 15 =")):
            messages = [{"role": "user", "content": said}]
            plain = {"model": model, "messages": messages, "ignore_eos": True}
            forced = {"model": model, "messages": messages, "response_format": FORMAT}
            asked += [plain, forced]
    return asked


def befall(router: Router, draw: random.Random) -> None:
    """Kill or freeze a process of a node, and wait until all nodes are ready again."""
    pid = draw.choice(draw.choice(router.get("/cluster")["nodes"])["pids"][:2])
    if draw.random() < 0.3:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(FREEZE_S)  # part of the fault, not a wait for something
        os.kill(pid, signal.SIGCONT)
        until(lambda: is_well(router, None))
    else:
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_well(router, pid))


def ask_while(going: Callable[[], bool], router: Router, known: list[str], seed: int) -> int:
    """Ask random questions one after the other. Return the number of right responses."""
    draw, asked, right = random.Random(seed), questions(), 0
    while going():
        number = draw.randrange(len(asked))
        found = answer(router, asked[number])
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
    write(tmp_path / "demo")
    make_vision_checkpoint(tmp_path / "images")
    served = [f"--model={tmp_path / name}" for name in MODELS]
    with (
        running(tmp_path / "var", *served, *FLAGS) as (router, _),
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        known = [answer(router, each) for each in questions()]
        assert len(set(known)) > len(known) // 3
        asking = [
            pool.submit(
                ask_while, lambda: not over.is_set(), router, known, draw.randrange(1 << 32)
            )
            for _ in range(CLIENTS)
        ]
        try:
            for _ in range(FAULTS):
                befall(router, draw)
                assert not any(each.done() for each in asking), [e.exception() for e in asking]
        finally:
            over.set()
        right = sum(each.result() for each in asking)
    print(f"{right} right responses")
    assert right > FAULTS
