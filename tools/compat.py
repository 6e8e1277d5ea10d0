"""Whether the API still is that of the last release for everybody who uses it: nothing removed, renamed, renumbered or of another type.

`make lint` runs it. Additions are fine. tests/data/api/node.released.textproto is the released API: at a release
`tools/compat.py --release` writes it anew, and refuses while the check fails: a break needs a new package, singularity.node.v2.
usage: tools/compat.py [--release]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto

RELEASED = Path(__file__).resolve().parent.parent / "tests/data/api/node.released.textproto"


def breaks(old: FileDescriptorProto, new: FileDescriptorProto) -> Iterator[str]:
    """Each thing of `old` that its users would miss in `new`, as a line."""
    if old.package != new.package:
        yield f"package {old.package} is {new.package}"
    yield from _of_messages("", old.message_type, new.message_type)
    yield from _of_enums("", old.enum_type, new.enum_type)
    services = _named(new.service)
    for service in old.service:
        if service.name not in services:
            yield f"service {service.name} is gone"
            continue
        methods = _named(services[service.name].method)
        for method in service.method:
            name = f"{service.name}.{method.name}"
            now = methods.get(method.name)
            if now is None:
                yield f"method {name} is gone"
                continue
            for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
                if getattr(method, what) != getattr(now, what):
                    yield f"method {name}: {what} was {getattr(method, what)}, is {getattr(now, what)}"


def _of_messages(outer: str, old: Iterable[DescriptorProto], new: Iterable[DescriptorProto]) -> Iterator[str]:
    messages = _named(new)
    for message in old:
        name = f"{outer}{message.name}"
        now = messages.get(message.name)
        if now is None:
            yield f"message {name} is gone"
            continue
        fields = _named(now.field)
        for field in message.field:
            if field.name not in fields:
                yield f"field {name}.{field.name} is gone"
            else:
                yield from _of_field(f"{name}.{field.name}", message, field, now, fields[field.name])
        yield from _of_messages(f"{name}.", message.nested_type, now.nested_type)
        yield from _of_enums(f"{name}.", message.enum_type, now.enum_type)


def _of_field(
    name: str, message: DescriptorProto, field: FieldDescriptorProto, message_now: DescriptorProto, now: FieldDescriptorProto
) -> Iterator[str]:
    if field.number != now.number:
        yield f"field {name}: its number was {field.number}, is {now.number}"
    before, after = _shape(message, field), _shape(message_now, now)
    if before != after:
        yield f"field {name}: was {before}, is {after}"


def _shape(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Type and cardinality in words, for example `optional int64`."""
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    return f"{kind} of oneof {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else kind


def _of_enums(outer: str, old: Iterable[EnumDescriptorProto], new: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    enums = _named(new)
    for enum in old:
        name = f"{outer}{enum.name}"
        if enum.name not in enums:
            yield f"enum {name} is gone"
            continue
        values = _named(enums[enum.name].value)
        for value in enum.value:
            if value.name not in values:
                yield f"value {name}.{value.name} is gone"
            elif value.number != values[value.name].number:
                yield f"value {name}.{value.name}: its number was {value.number}, is {values[value.name].number}"


def _named(things: Iterable[Any]) -> dict[str, Any]:
    return {thing.name: thing for thing in things}


def current() -> FileDescriptorProto:
    """The API of this checkout, as the generated code has it."""
    from singularityd.api.v1 import node_pb2

    descriptor = descriptor_pb2.FileDescriptorProto()
    node_pb2.DESCRIPTOR.CopyToProto(descriptor)
    return descriptor


def main(arguments: list[str]) -> int:
    """0 where nothing is missing, 1 otherwise, 64 for other arguments."""
    if arguments not in ([], ["--release"]):
        sys.stderr.write("usage: tools/compat.py [--release]\n")
        return 64
    now = current()
    found = list(breaks(text_format.Parse(RELEASED.read_text(), descriptor_pb2.FileDescriptorProto()), now))
    for line in found:
        sys.stderr.write(f"compat: {line}\n")
    if found:
        sys.stderr.write("compat: these break clients of the last release; keep what was, and add beside it\n")
        return 1
    if arguments:
        RELEASED.write_text(text_format.MessageToString(now))
    sys.stdout.write(f"compat: {now.package} keeps all that was released\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
