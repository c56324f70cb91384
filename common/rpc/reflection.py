"""gRPC reflection under both of its names.

grpcio has v1alpha. Clients try v1 first, and newer ones try only that. Both have the same messages.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def servicer(services: Sequence[str]) -> Any:
    """Return a servicer that lists `services` and reflection itself.

    Args:
        services: full names.
    """
    _describe_v1()
    return reflection.aio.ReflectionServicer((*services, *NAMES))


def add_to_server(servicer: Any, server: Any) -> None:
    """Register the servicer under both names, like generated code."""
    add: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(NAMES[0], {"ServerReflectionInfo": handler})


def _describe_v1() -> None:
    """Add v1 to protobuf's descriptors, which reflection returns. Idempotent."""
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    file = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
