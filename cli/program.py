"""What `baton NAME` turns into: `python -m cli.program NAME MODULE [ARGUMENT]...` runs that module.
Who interrupts it, be it while it imports what it needs, reads a sentence."""

import runpy
import sys

EXIT_INTERRUPTED = 130  # 128 and SIGINT, as shells say it


def main() -> None:
    """Exits as the module does, which finds its arguments as if it had been started itself."""
    _, name, module, *arguments = sys.argv
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        print(f"baton {name}: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
