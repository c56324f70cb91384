"""The gRPC API, from the comments and fields of protos/*.proto."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).parents[2]
# Ordered by caller: clients, operators, routers, decode nodes. Then the messages that several use.
FILES = (
    "router",
    "request",
    "sampling",
    "node",
    "decode",
    "pooling",
    "kvtransfer",
    "ranks",
    "images",
    "prefixes",
    "last_words",
)
_HEAD = """# gRPC API

Every component has reflection and the health service: `grpcurl -plaintext HOST:PORT list`. Clients
need only the service Router. The other services connect the components. With a
[cluster secret](../tls.md#cluster-secret) their callers, and reflection on a node, need a token.
"""
# Field numbers in descriptor.proto, of which the paths of comments are made.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_MEMBER = 2
_Path = tuple[int, ...]


def page() -> str:
    with tempfile.NamedTemporaryFile() as made:
        # In a process of its own: a process that has loaded grpc_tools cannot load nixl any more.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
        command += ["--include_source_info", f"--descriptor_set_out={made.name}"]
        command += [str(ROOT / "protos" / f"{name}.proto") for name in FILES]
        subprocess.run(command, check=True)
        described = FileDescriptorSet.FromString(made.read())
    by_name = {Path(file.name).stem: file for file in described.file}
    return _HEAD + "".join(part for name in FILES for part in _file(by_name[name]))


def _file(file: FileDescriptorProto) -> Iterator[str]:
    about = {
        tuple(place.path): _sentence(place.leading_comments or place.trailing_comments)
        for place in file.source_code_info.location
    }
    # The comment above `syntax` describes the file.
    syntax = file.source_code_info.location
    head = next((_sentence(place.leading_comments) for place in syntax if place.path == [12]), "")
    yield f"\n## {file.name}\n\n{head}\n"
    for index, service in enumerate(file.service):
        yield from _service(service, (_SERVICE, index), about)
    for index, message in enumerate(file.message_type):
        yield from _message(message, (_MESSAGE, index), about)
    for index, enum in enumerate(file.enum_type):
        yield from _enum(enum, (_ENUM, index), about)


def _service(
    service: ServiceDescriptorProto, path: _Path, about: dict[_Path, str]
) -> Iterator[str]:
    yield f"\n### service {service.name}\n\n{about.get(path, '')}\n\n"
    yield "| method | request | response | description |\n|---|---|---|---|\n"
    for index, method in enumerate(service.method):
        takes = _stream(method.client_streaming) + _link(method.input_type)
        returns = _stream(method.server_streaming) + _link(method.output_type)
        comment = about.get((*path, _MEMBER, index), "")
        yield f"| `{method.name}` | {takes} | {returns} | {comment} |\n"


def _message(message: DescriptorProto, path: _Path, about: dict[_Path, str]) -> Iterator[str]:
    yield f"\n### {message.name}\n\n{about.get(path, '')}\n\n"
    if not message.field:
        return
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    yield "| field | type | description |\n|---|---|---|\n"
    for index, field in enumerate(message.field):
        kind, comment = _field(field, entries), about.get((*path, _MEMBER, index), "")
        yield f"| `{field.name}` = {field.number} | {kind} | {comment} |\n"


def _enum(enum: EnumDescriptorProto, path: _Path, about: dict[_Path, str]) -> Iterator[str]:
    yield f"\n### {enum.name}\n\n{about.get(path, '')}\n\n| value | description |\n|---|---|\n"
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` = {value.number} | {about.get((*path, _MEMBER, index), '')} |\n"


def _field(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = entry.field
        return f"map of {_scalar(key)} to {_scalar(value)}"
    repeated = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    optional = "optional " if field.proto3_optional else ""
    return repeated + optional + _scalar(field)


def _scalar(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(full_name: str) -> str:
    name = full_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _stream(streaming: bool) -> str:
    return "stream of " if streaming else ""


def _sentence(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")
