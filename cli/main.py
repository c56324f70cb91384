"""The `baton` command. It replaces itself with the process of the command that its words name.

It imports none of the commands. It starts none if another distribution has overwritten one of
Baton's packages.
"""

import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from cli import own_names

EXIT_USAGE = 2


class CliCommand(NamedTuple):
    """A command.

    Attributes:
        summary: purpose in one line.
        module: run as `python -m MODULE`. It has a function `parser`, unless there is a `record`.
        first: arguments of the module before those of the user.
        needs: packages that an installation for routers lacks.
        record: class of common.config whose settings are the flags.
    """

    summary: str
    module: str
    first: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    record: str = ""


class CliGroup(NamedTuple):
    """Commands that share their first word."""

    summary: str
    commands: Mapping[str, CliCommand]


def _operator_group(name: str, summary: str, **summaries: str) -> CliGroup:
    names = {each.replace("_", "-"): text for each, text in summaries.items()}
    return CliGroup(
        summary, {each: _operation(f"{name} {each}", text) for each, text in names.items()}
    )


def _operation(name: str, summary: str) -> CliCommand:
    return CliCommand(summary, "cli.operating", first=(name,))


_NODE = ("torch", "triton", "transformers", "safetensors", "numpy")

COMMANDS: Mapping[str, CliCommand | CliGroup] = {
    "up": CliCommand("Start a router and nodes on this machine, and serve", "cli.up", needs=_NODE),
    "serve": CliGroup(
        "Run one process of a cluster",
        {
            "router": CliCommand("Run a router", "router", record="RouterConfig"),
            "prefill": CliCommand(
                "Run a prefill node", "prefill_node", needs=_NODE, record="PrefillConfig"
            ),
            "decode": CliCommand(
                "Run a decode node", "decode_node", needs=_NODE, record="DecodeConfig"
            ),
            "encode": CliCommand(
                "Run an encode node, for images", "encode_node", needs=_NODE, record="EncodeConfig"
            ),
        },
    ),
    "rank-host": CliCommand(
        "Run ranks of a node on a host other than its first one",
        "node.hosts.rank_host",
        needs=_NODE,
        record="RankHostConfig",
    ),
    "status": _operation("status", "Show the health of a cluster on one page"),
    "nodes": _operator_group(
        "nodes",
        "List and operate the nodes of a cluster",
        list="List the nodes with their states",
        drain="Drain a node or a router, and end its process",
        pause="Pause inference on all nodes or on one",
        resume="Resume inference after a pause",
        sleep="Release the memory of all nodes or of one",
        wake="Allocate the memory again that `baton nodes sleep` released",
        set_role="Change the role of a node",
        update_weights="Replace the weights on all nodes",
        profile="Record traces of nodes with the profiler of torch",
    ),
    "requests": _operator_group(
        "requests",
        "List, inspect and migrate requests",
        list="List running requests and the last ones that ended",
        show="Show the history of a request on every process",
        migrate="Migrate a running request to another decode node",
    ),
    "rollout": _operation("rollout", "Restart all processes of a cluster, one at a time"),
    "models": _operator_group(
        "models", "List the models of a router", list="List the model and its LoRA adapters"
    ),
    "adapters": _operator_group(
        "adapters",
        "List, load and unload LoRA adapters",
        list="List the loaded LoRA adapters",
        load="Load a LoRA adapter on all nodes",
        unload="Unload a LoRA adapter from all nodes",
    ),
    "weights": _operator_group(
        "weights", "List the weights of nodes", list="List the weights that each node uses"
    ),
    "planner": CliCommand("Recommend or change the roles and number of nodes", "cli.planner"),
    "plan": CliCommand("Predict the best layout of GPUs for a load, without a GPU", "cli.plan"),
    "sim": CliCommand(
        "Run a simulated cluster in virtual time, without a GPU", "cli.sim", needs=("numpy",)
    ),
    "top": CliCommand("Watch a cluster: nodes, pages, queues, links, rates", "cli.top"),
    "generate": CliCommand("Send a prompt to a router and stream the response", "cli.generate"),
    "bench": CliCommand(
        "Measure load, disaggregation and its break-even point",
        "bench",
        needs=("numpy",),
    ),
    "check": CliCommand(
        "Check that a configuration and a model run on this machine", "cli.check", needs=_NODE
    ),
    "config": CliGroup(
        "Show and validate settings",
        {
            "show": CliCommand(
                "Show all settings of a process with their sources", "cli.config", ("show",)
            ),
            "validate": CliCommand("Validate a YAML file of settings", "cli.config", ("validate",)),
        },
    ),
    "api-key": CliCommand("Create an API key and its entry for --api-keys", "cli.api_key"),
    "cluster-secret": CliCommand(
        "Create a cluster secret, or derive a key or token from one", "cli.cluster_secret"
    ),
    "demo-model": CliCommand("Write the small model that `baton up` serves", "cli.demo_model"),
    "completion": CliCommand("Print the completion script of a shell", "cli.completion"),
}

# Names of version 0.1. `weights` is now a group, and the update is a command of nodes.
RENAMED = {
    "move": "requests migrate",
    "explain": "requests show",
    "switch": "nodes set-role",
    "drain": "nodes drain",
    "pause": "nodes pause",
    "continue": "nodes resume",
    "sleep": "nodes sleep",
    "wake": "nodes wake",
    "weights": "nodes update-weights",
    "profile": "nodes profile",
    "roll": "rollout",
    "keys": "api-key",
    "secret": "cluster-secret",
    "router": "serve router",
    "prefill": "serve prefill",
    "decode": "serve decode",
}


def commands() -> Iterator[tuple[str, CliCommand]]:
    """Yield every command with its whole name, such as "nodes drain"."""
    for name, entry in COMMANDS.items():
        if isinstance(entry, CliCommand):
            yield name, entry
            continue
        for below, command in entry.commands.items():
            yield f"{name} {below}", command


def usage(group: str = "") -> str:
    """Return the help of `baton`, or of a group of its commands."""
    entry = COMMANDS.get(group)
    entries = entry.commands if isinstance(entry, CliGroup) else COMMANDS
    program = f"baton {group}".strip()
    lines = [f"  {name:<15} {each.summary}" for name, each in entries.items()]
    about = [entry.summary + ".", ""] if entry else []
    return "\n".join(
        [
            f"usage: {program} COMMAND [ARGUMENT]...",
            "",
            *about,
            *lines,
            "",
            f"`{program} COMMAND --help` shows the options of a command, `--help-all` all of them."
            + ("" if group else "\n`baton --version` prints the version."),
        ]
    )


def _say(text: str) -> None:
    from common.process.standard_output import (
        say,  # imported late: `common` may be another distribution's package
    )

    say(text)


def _refuse(sentence: str) -> int:
    print(f"baton: {sentence}", file=sys.stderr)
    return EXIT_USAGE


def _run(name: str, command: CliCommand, arguments: Sequence[str]) -> int:
    """Replace this process with the command. Returns an exit code if that is impossible."""
    if wrong := own_names.clash():
        return _refuse(wrong)
    if lacking := missing(command):
        return _refuse(
            f"`baton {name}` needs {', '.join(lacking)}, which an installation for routers lacks: "
            "run `pip install .` in Baton's directory, without --no-deps"
        )
    # gRPC's C core logs in a format of its own. It reads its level when grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # -P: do not import a directory of the user that is called router.
    program = ["-m", "cli.program", name, command.module, *command.first, *arguments]
    os.execv(sys.executable, [sys.executable, "-P", *program])


def missing(command: CliCommand) -> list[str]:
    """Return the packages that the command needs and this installation lacks."""
    return [each for each in command.needs if find_spec(each) is None]


def _unknown(words: Sequence[str]) -> str:
    """Return an error about words that name no command, with the most similar command."""
    given = " ".join(words)
    prefix, entry = "", COMMANDS.get(words[0])
    known = {name: name for name, _ in commands()} | {name: name for name in COMMANDS}
    if isinstance(entry, CliGroup):
        prefix = f"{words[0]} "
        known = {name: f"{prefix}{name}" for name in entry.commands}
    else:  # a command of a group, without the group's name
        known |= {name.rpartition(" ")[2]: name for name, _ in commands()}
    near = difflib.get_close_matches(words[-1], known, 1)
    meant = f"did you mean `baton {known[near[0]]}`? " if near else ""
    listed = f"baton {prefix}--help"
    return f"there is no command `baton {given}` ({meant}`{listed}` lists all)"


def main() -> int:
    match sys.argv[1:]:
        case ["-h" | "--help" | "--help-all" | "help"]:
            _say(usage())
            return 0
        case ["--version"]:
            from common import VERSION

            _say(f"baton {VERSION}")
            return 0
        case []:
            print(usage(), file=sys.stderr)
            return EXIT_USAGE
        case [name, *arguments]:
            return _dispatch(name, arguments)
    return EXIT_USAGE


def _dispatch(name: str, arguments: Sequence[str]) -> int:
    match COMMANDS.get(name), arguments:
        case CliCommand() as command, _:
            return _run(name, command, arguments)
        case CliGroup(), ["-h" | "--help" | "--help-all" | "help"]:
            _say(usage(name))
            return 0
        case CliGroup(commands=below), [part, *rest] if part in below:
            return _run(f"{name} {part}", below[part], rest)
        case CliGroup(), [part, *_] if name not in RENAMED:
            return _refuse(_unknown([name, part]))
        case CliGroup(), [] if name not in RENAMED:
            print(usage(name), file=sys.stderr)
            return EXIT_USAGE
    if name in RENAMED:
        return _refuse(f"`baton {name}` is now `baton {RENAMED[name]}`")
    return _refuse(_unknown([name]))


if __name__ == "__main__":
    sys.exit(main())
