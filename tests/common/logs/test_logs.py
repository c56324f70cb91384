"""The log format of a process, as a log collector reads it."""

import json
import subprocess
import sys

import pytest

HEAD = "import logging, threading; from common import logs; from common.logs import kv\n"


def lines_of(code, log_format, level="info"):
    """Return the stderr lines of a process that sets up its log and then runs `code`."""
    setup = (
        f"logs.setup('decode engine', {level!r}, {log_format!r})\nlog = logging.getLogger('x')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", HEAD + setup + code], capture_output=True, text=True
    )
    return done.stderr.splitlines()


def records_of(code, **options):
    return [json.loads(line) for line in lines_of(code, "json", **options)]


LINE = "log.info('hand-off failed %s', kv(request_id='a b', tokens=3, seconds=0.25, over=True))"


def test_a_line_of_text_ends_with_its_fields():
    (line,) = lines_of(LINE, "text")
    time, rest = line.split(" ", 1)
    assert time.endswith("Z") and len(time) == len("2026-01-01T00:00:00.000Z")
    sentence = (
        'INFO decode engine x: hand-off failed request_id="a b" tokens=3 seconds=0.25 over=True'
    )
    assert rest == sentence


def test_a_line_of_json_is_one_object_with_its_fields():
    (record,) = records_of(LINE)
    time = record.pop("time")
    assert time.endswith("Z") and len(time) == len("2026-01-01T00:00:00.000Z")
    assert record == {
        "level": "info",
        "program": "decode engine",
        "logger": "x",
        "message": "hand-off failed",
        "request_id": "a b",
        "tokens": 3,
        "seconds": 0.25,
        "over": True,
    }


# Seen failing without the level of grpc._common: a line of its own, "Exception deserializing
# message!", with a traceback.
def test_an_undecodable_response_is_reported_by_the_caller_without_an_extra_line():
    code = """
import asyncio, grpc
from common import rpc
from protos import router_pb2_grpc, router_pb2

class Garbage(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            return b"\\xff\\xff"
        return grpc.unary_unary_rpc_method_handler(answer)

async def main():
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0)
    server.add_generic_rpc_handlers((Garbage(),))
    await server.start()
    async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        log.info("got %s", await stub.Tokenize(router_pb2.TokenizeRequest(text="a")))
    await server.stop(None)

asyncio.run(main())
"""
    (record,) = records_of(code)
    assert record["message"] == "got None"


def test_a_clients_text_stays_in_its_field():
    code = "log.warning('refused %s', kv(because='x\\n{\"level\":\"error\"} %s', level='y' * 9999))"
    (record,) = records_of(code)
    assert record["because"] == 'x\n{"level":"error"} %s'
    assert record["level"] == "warning"
    assert len(record["level_"]) < 400


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("numpy.float64(0.5)", 0.5),
        ("numpy.int32(7)", "7"),
        ("b'x'.decode() + '\\udc80'", "x\udc80"),
        ("float('nan')", None),
        ("2 ** 70", 2**70),
        ("None", None),
    ],
)
def test_every_value_can_be_logged(value, shown):
    (record,) = records_of(f"import numpy\nlog.info('%s said %s', {value}, kv(what={value}))")
    assert record["what"] == shown
    (line,) = lines_of(f"import numpy\nlog.info('said %s', kv(what={value}))", "text")
    assert "what=" in line


def test_an_argument_that_is_no_field_is_part_of_the_sentence():
    (record,) = records_of("log.info('%s of %d %s', 'one', 2, kv(rest=3))")
    assert (record["message"], record["rest"]) == ("one of 2", 3)


def test_a_sentence_without_arguments_may_have_percent_signs():
    (record,) = records_of("log.info('90 % done')")
    assert record["message"] == "90 % done"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "uncaught exception"),
        (
            "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
            "uncaught exception in a thread",
        ),
        ("try:\n  1 / 0\nexcept ZeroDivisionError:\n  log.exception('failed')", "failed"),
    ],
)
def test_an_exception_is_one_object_with_its_traceback(code, message):
    (record,) = records_of(code)
    assert record["message"] == message
    assert record["exception"] == "ZeroDivisionError: division by zero"
    assert record["traceback"].startswith("Traceback (most recent call last):\n")
    assert record["level"] in ("error", "critical")


def test_warnings_are_logged():
    (record,) = records_of("import warnings; warnings.warn('old', stacklevel=1)")
    assert record["logger"] == "py.warnings" and "UserWarning: old" in record["message"]


def test_a_field_is_not_rendered_for_a_line_that_is_not_written():
    code = """
class Expensive:
    def __str__(self):
        raise AssertionError("rendered")
log.debug('quiet %s', kv(value=Expensive()))
log.info('done')
"""
    for log_format in ("text", "json"):
        (line,) = lines_of(code, log_format)
        assert "done" in line
