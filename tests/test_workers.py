"""`--workers` runs every test once, in processes that share nothing after collection."""

import os
import re
import subprocess
import sys

from tests.support.runner.isolation import ROOT

FILES = {
    "conftest.py": """
        import os
        import pathlib
        import pytest

        @pytest.fixture(scope="session", autouse=True)
        def whole(request):
            yield
            ends = pathlib.Path(request.config.rootpath, "ends")
            ends.mkdir(exist_ok=True)
            (ends / str(os.getpid())).touch()
    """,
    "test_a.py": """
        import os
        import signal
        import pytest

        def test_first():
            os.kill(os.getpid(), signal.SIGKILL)

        @pytest.mark.skip(reason="a reason")
        def test_second():
            raise AssertionError

        def test_third(capfd):
            print("printed")
            assert capfd.readouterr().out == "printed\\n"
    """,
    "test_b.py": """
        import os
        import pytest
        from tests.support.runner import workers

        PARENT = os.getpid()

        @pytest.fixture(scope="module")
        def process():
            return os.getpid()

        def test_first(process):
            assert process == os.getpid() != PARENT

        def test_second(process):
            assert process == os.getpid()

        def test_third():
            print("output of a failure")
            raise ValueError("a message")
    """,
    "test_c.py": "def test_first(): pass",
}


def run(directory, *flags):
    for name, text in FILES.items():
        indented = re.match(r"\s*", text)[0]
        (directory / name).write_text(text.replace(indented, "\n") if indented else text)
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-ra",
        "-p",
        "tests.support.runner.workers",
        *flags,
    ]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_every_test_runs_once_and_a_worker_that_crashes_fails_only_its_test(tmp_path):
    code, output = run(tmp_path, "--workers=2")
    assert code == 1
    lines = sorted(re.findall(r"(test_\w\.py::test_\w+) (PASSED|FAILED|SKIPPED)", output))
    assert lines == [
        ("test_a.py::test_first", "FAILED"),
        ("test_a.py::test_second", "SKIPPED"),
        ("test_a.py::test_third", "PASSED"),
        ("test_b.py::test_first", "PASSED"),
        ("test_b.py::test_second", "PASSED"),
        ("test_b.py::test_third", "FAILED"),
        ("test_c.py::test_first", "PASSED"),
    ]
    assert "the process that ran this test ended with -9" in output
    assert "ValueError: a message" in output and "output of a failure" in output
    assert "2 failed, 4 passed, 1 skipped" in output
    assert len(list((tmp_path / "ends").iterdir())) == 2


def test_a_run_stops_after_the_allowed_number_of_failures(tmp_path):
    code, output = run(tmp_path, "--workers=1", "-x")
    assert code == 1 and "stopping after 1 failures" in output
    assert "1 failed in" in output
