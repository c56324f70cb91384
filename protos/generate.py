"""Regenerate the committed gRPC code: python -m protos.generate [output directory]."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Write *_pb2.py and *_pb2.pyi for each proto, and *_pb2_grpc.py for each proto with a service,
    below `output`/protos.
    """
    paths = sorted((ROOT / "protos").glob("*.proto"))
    served = [path for path in paths if "\nservice " in path.read_text()]
    messages = [f"--python_out={output}", f"--pyi_out={output}"]
    for outputs, sources in ((messages, paths), ([f"--grpc_python_out={output}"], served)):
        names = [str(path.relative_to(ROOT)) for path in sources]
        if status := protoc.main(["protoc", f"-I{ROOT}", *outputs, *names]):
            raise SystemExit(status)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
