"""`baton plan`: predicts which layout of GPUs serves a load within latency limits. Needs no GPU."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from cli import client
from cli.operating.command import size, table
from common.process.standard_output import say
from common.settings import ConfigArgumentParser, add_options, wrong
from simulation.cost.kernels import GPUS
from simulation.cost.models import MODELS
from simulation.cost.step_cost import PATHS
from simulation.plan import Candidate, Hardware, LatencyTargets, Plan, Traffic, make_plan
from simulation.verification import Verification, Verified, verify

PROGRAM = "baton plan"
_VERIFIED_S = 300.0
_HEADER = ("layout", "requests/s", "TTFT p90", "TPOT p90", "KV used", "bottleneck", "")


class _Gpus(NamedTuple):
    number: int
    kind: str


def _gpus(text: str) -> _Gpus:
    """Parse 16xH100, for argparse."""
    match = re.fullmatch(r"(\d{1,6})x(.+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid: expected a form like 16xH100")
    kind = match[2].lower() if match[2].lower() in GPUS else match[2]
    return _Gpus(int(match[1]), kind)


def parser() -> ConfigArgumentParser:
    parser = ConfigArgumentParser(
        prog=PROGRAM,
        description="Predict which split into prefill and decode nodes, or which colocated nodes, "
        "serve a load within limits of TTFT and TPOT. All figures are simulated: a cost model, "
        "closed forms of queues, and the best layouts in virtual time. Needs no GPU.",
    )
    kinds = ", ".join(GPUS)
    models = ", ".join(name for name, shape in MODELS.items() if shape.kv.is_uniform)
    parser.add_argument(
        "--model", required=True, help=f"directory with config.json, or one of {models}"
    )
    parser.add_argument(
        "--gpus",
        required=True,
        type=_gpus,
        metavar="NxGPU",
        help=f"number and kind of GPUs: {kinds}, or a file of `baton bench steps`",
    )
    limits = parser.add_argument_group("limits", "Limits for 90 % of the requests.")
    for name, what in (("ttft", "time to first token"), ("tpot", "time per output token")):
        limits.add_argument(
            f"--{name}",
            required=True,
            type=client.positive,
            metavar="S",
            help=f"{what} in seconds",
        )
    add_options(
        parser.add_argument_group("load", "--load, or --rate with --input and --output."),
        ("--load", Path, None, "FILE", "JSON lines: timestamp (ms), input_length, output_length"),
        ("--rate", client.positive, None, "R", "requests a second (the mean rate of --load)"),
        ("--input", client.ranged(int, 1), None, "TOKENS", "tokens of a prompt"),
        ("--output", client.ranged(int, 1), None, "TOKENS", "tokens of a response"),
    )
    parser.add_argument(
        "--path", choices=PATHS, default="rdma400", help="link between nodes (%(default)s)"
    )
    top = "layouts to show (%(default)s)"
    parser.add_argument("--top", type=client.ranged(int, 1), default=5, metavar="N", help=top)
    add_options(
        parser.add_argument_group("virtual time", "Runs of the best layouts by `baton sim`."),
        (
            "--verify",
            client.ranged(int, 0),
            3,
            "K",
            "layouts to run, and the best of each kind. 0: none (3)",
        ),
        (
            "--verify-limit",
            client.positive,
            _VERIFIED_S,
            "S",
            f"seconds after which the runs are ended ({_VERIFIED_S:.0f})",
        ),
    )
    client.add_json_flag(parser)
    return parser


def _traffic(options: argparse.Namespace) -> Traffic:
    """Return the load. Raises ValueError."""
    lengths = options.input, options.output
    if options.load is not None:
        if lengths != (None, None):
            raise ValueError("--load has the lengths: remove --input and --output")
        return Traffic.read(options.load, options.rate)
    if None in (options.rate, *lengths):
        raise ValueError("the load is missing: give --load, or --rate, --input and --output")
    return Traffic.uniform(options.rate, *lengths)


def main() -> int:
    options = parser().parse_args()
    try:
        traffic = _traffic(options)
        hardware = Hardware(options.gpus.number, options.gpus.kind, options.model, options.path)
        targets = LatencyTargets(options.ttft, options.tpot)
        plan = make_plan(hardware, traffic, targets)
        verification = _verification(plan, hardware, traffic, targets, options)
    except ValueError as error:
        wrong(PROGRAM, str(error))
    if options.json:
        say(json.dumps(_json(plan, verification, traffic, options), indent=2))
    else:
        say("\n".join(_lines(plan, verification, traffic, options)))
    return 0


def _verification(
    plan: Plan,
    hardware: Hardware,
    traffic: Traffic,
    targets: LatencyTargets,
    options: argparse.Namespace,
) -> Verification | None:
    """Return the best layouts in virtual time, or None without --verify or without such layouts."""
    if not options.verify or not plan.candidates[0].capacity:
        return None
    limit_s = options.verify_limit
    return verify(plan, hardware, traffic, targets, count=options.verify, limit_s=limit_s)


def _lines(
    plan: Plan, verification: Verification | None, traffic: Traffic, options: argparse.Namespace
) -> Iterator[str]:
    band, ttft_band = f"{plan.band:.0%}", f"{plan.ttft_band:.0%}"
    yield (
        f"Simulated by a cost model and closed forms: requests/s and TPOT within {band}, TTFT "
        f"within {ttft_band}. Not measured."
    )
    yield (
        f"Load: {traffic.rate:.3g} requests/s with {traffic.input:.0f} input and "
        f"{traffic.output:.0f} output tokens on average. Limits: TTFT {options.ttft:g} s, TPOT "
        f"{1e3 * options.tpot:g} ms."
    )
    for node in plan.nodes:
        yield (
            f"Node of {node.tp} GPU{'s' * (node.tp > 1)}: {size(node.weight_bytes)} of weights, KV "
            f"for {node.kv_capacity_tokens} tokens of {node.kv_bytes_per_token} bytes. Simulated: "
            f"prompt {1e3 * node.prefill_s:.1f} ms +-{band}, hand-off on an idle {options.path} "
            f"link {1e3 * node.hand_off_s:.1f} ms."
        )
    yield ""
    yield table(
        (
            _HEADER[0],
            f"simulated max requests/s +-{band}",
            f"simulated TTFT p90 +-{ttft_band}",
            f"simulated TPOT p90 +-{band}",
            *_HEADER[4:],
        ),
        [_row(each) for each in plan.leaders(options.top)],
    )
    yield ""
    yield plan.verdict
    if verification is not None:
        yield ""
        yield from _verified_lines(verification, plan, LatencyTargets(options.ttft, options.tpot))
    yield from _advice(plan, traffic, options)


def _row(one: Candidate) -> tuple[str, ...]:
    forecast = one.forecast
    return (
        one.layout.name,
        f"{one.capacity:.3g}" if one.capacity else "none",
        _milliseconds(forecast.ttft),
        _milliseconds(forecast.tpot),
        f"{forecast.kv_used:.0%}",
        one.bottleneck,
        "tie" if one.tie else "",
    )


def _verified_lines(
    verification: Verification, plan: Plan, targets: LatencyTargets
) -> Iterator[str]:
    """Yield the table of layouts in virtual time.

    The latencies are those of the run at the highest rate within the limits.
    """
    band = f"+-{plan.band:.0%}"
    yield table(
        (
            "layout in virtual time",
            f"simulated max requests/s {band}",
            f"closed form {band}",
            f"simulated TTFT p90 +-{plan.ttft_band:.0%}",
            f"simulated TPOT p90 {band}",
            "runs",
            "",
        ),
        [_verified_row(each, targets) for each in verification.layouts],
    )
    yield ""
    yield verification.verdict


def _verified_row(one: Verified, targets: LatencyTargets) -> tuple[str, ...]:
    run = one.highest_within(targets)
    figures = (run.ttft, run.tpot) if run else (None, None)
    capacity = "none" if one.capacity == 0 else "no time left"
    return (
        one.candidate.layout.name,
        f"{one.capacity:.3g}" if one.capacity else capacity,
        f"{one.candidate.capacity:.3g}",
        *("" if each is None else _milliseconds(each) for each in figures),
        str(len(one.runs)),
        "tie" if one.tie else "",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < float("inf") else "overload"


def _advice(plan: Plan, traffic: Traffic, options: argparse.Namespace) -> Iterator[str]:
    best = plan.candidates[0]
    if not best.capacity:
        yield f"Even without queues, the limit is {best.bottleneck}."
        return
    if best.capacity < traffic.rate:
        yield (
            f"These GPUs do not serve {traffic.rate:.3g} requests/s within the limits: the best "
            f"layout serves {best.capacity:.3g} (simulated, +-{plan.band:.0%})."
        )
    if traffic.prefixes:
        yield "Shared prefixes of the file are computed each time: prefix caches need less."
    yield f"Start the best layout: {best.layout.command(options.model, best.slots)}"


def _json(
    plan: Plan, verification: Verification | None, traffic: Traffic, options: argparse.Namespace
) -> dict[str, object]:
    """Return the plan as JSON values. An infinite latency is null."""
    candidates = [
        {
            **msgspec.to_builtins(each),
            "name": each.layout.name,
            "command": each.layout.command(options.model, each.slots),
        }
        for each in plan.leaders(options.top)
    ]
    found = {
        "simulated": True,
        "band": {"requests": plan.band, "tpot": plan.band, "ttft": plan.ttft_band},
        "rate": traffic.rate,
        "nodes": plan.nodes,
        "layouts": candidates,
        "verdict": plan.verdict,
        "verified": None if verification is None else _verified_json(verification),
    }
    builtins: dict[str, object] = msgspec.json.decode(msgspec.json.encode(found))
    return builtins


def _verified_json(verification: Verification) -> dict[str, object]:
    layouts = [
        {
            "name": each.candidate.layout.name,
            "capacity": each.capacity,
            "closed_form": each.candidate.capacity,
            "tie": each.tie,
            "runs": each.runs,
        }
        for each in verification.layouts
    ]
    return {"layouts": layouts, "verdict": verification.verdict}


if __name__ == "__main__":
    sys.exit(main())
