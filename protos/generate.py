"""Regenerates the committed gRPC code: python -m protos.generate [output directory]."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py of every proto below `output`/protos."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    arguments = [f"-I{ROOT}", f"--python_out={output}", f"--pyi_out={output}"]
    status = protoc.main(["protoc", *arguments, f"--grpc_python_out={output}", *sources])
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
