"""Two models behind one router, as `baton up` runs them: real processes, tokenizers and engines."""

import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.demo_model import write
from tests.support.models import noise_model
from tests.support.processes.local_system import running, until

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROMPTS = ("add 27 15 =", "Once upon a time", "größer")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with different tokenizers and weights."""
    directories = {name: tmp_path_factory.mktemp(name) / "model" for name in ("demo", "noise")}
    write(directories["demo"])
    noise_model.write(directories["noise"])
    return directories


def test_two_models_serve_side_by_side_and_one_survives_the_failure_of_the_other(models, tmp_path):
    flags = [f"--model={path}" for path in models.values()]
    flags += [f"--served-model-name={name}" for name in models]
    flags += ["--prefill=1", "--prefill=0"]  # the nodes of `noise` are colocated
    asked = [(name, prompt) for prompt in PROMPTS for name in models]
    with running(tmp_path / "both", *flags) as (router, up):
        with ThreadPoolExecutor(len(asked)) as pool:
            together = dict(
                zip(asked, pool.map(lambda one: router.streamed(*one), asked), strict=True)
            )
        assert [each["id"] for each in router.get("/v1/models")["data"]] == [*models]
        nodes = router.get("/cluster")["nodes"]
        counts = [(node["served_model"], node["role"]) for node in nodes]
        assert counts == [("demo", "prefill"), ("demo", "decode"), ("noise", "decode")]

        up.send(signal.SIGSTOP)  # it restarts no process during the test
        for node in nodes:
            if node["served_model"] == "demo":
                os.kill(node["pids"][0], signal.SIGKILL)
        until(lambda: router.get("/ready")["models"]["demo"] != "ready")
        with pytest.raises(urllib.error.HTTPError) as lost:
            router.streamed("demo", PROMPTS[0])
        with lost.value:
            assert (lost.value.code, lost.value.headers["retry-after"]) == (503, "1")
        assert router.get("/ready")["models"]["noise"] == "ready"
        assert router.streamed("noise", PROMPTS[0]) == together["noise", PROMPTS[0]]
        up.send(signal.SIGCONT)
        until(lambda: router.get("/ready")["models"]["demo"] == "ready")
        assert router.streamed("demo", PROMPTS[0]) == together["demo", PROMPTS[0]]
        up.send(signal.SIGINT)
        assert up.exit_code() == 0, up.output

    for name, path in models.items():
        with running(tmp_path / name, f"--model={path}") as (router, _):
            alone = {prompt: router.streamed(str(path), prompt) for prompt in PROMPTS}
        assert alone == {prompt: together[name, prompt] for prompt in PROMPTS}
        assert len(set(alone.values())) == len(PROMPTS)
