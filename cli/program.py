"""Entry point of every `baton` command: `python -m cli.program NAME MODULE [ARGUMENT]...`.

An interrupt, even during imports, prints one sentence.
"""

import runpy
import sys

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells


def main() -> None:
    """Run the module with its arguments, as if started directly, and exit with its code."""
    _, name, module, *arguments = sys.argv
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        print(f"baton {name}: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
