"""Compile and load one program file with bcc and hand the descriptors over. Runs under the system's Python and ends.

This file is started by path, never imported: the system's Python has bcc (Debian's python3-bpfcc), the daemon's does not, and the
long-lived halves never hold LLVM (130 MiB). usage: bcc_child.py REQUEST, where REQUEST is JSON: {socket, source, include, defines,
programs: {name: [type, attach_type]}, maps: [names]}. Answers one JSON datagram; on success the descriptors travel with it in the
order of `programs`, then `maps`.
"""

import ctypes
import json
import socket
import sys
from typing import Any

STRUCT = 4
OPTIONAL = {"TASK_TGID"}


class BtfType(ctypes.Structure):
    """The head of struct btf_type, which the members follow."""

    _fields_ = (("name", ctypes.c_uint32), ("info", ctypes.c_uint32), ("size", ctypes.c_uint32))


class BtfMember(ctypes.Structure):
    """struct btf_member."""

    _fields_ = (("name", ctypes.c_uint32), ("type", ctypes.c_uint32), ("offset", ctypes.c_uint32))


def member_offset(structure: str, member: str) -> int | None:
    """Byte offset of a member in the RUNNING kernel's own description of itself, None where it has none.

    The headers that bcc compiles with may be of any version; a layout taken from them would read garbage.
    """
    lib = ctypes.CDLL("libbpf.so.1")
    lib.btf__load_vmlinux_btf.restype = ctypes.c_void_p
    lib.btf__type_by_id.restype = ctypes.c_void_p
    lib.btf__name_by_offset.restype = ctypes.c_char_p
    lib.btf__name_by_offset.argtypes = lib.btf__type_by_id.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    lib.btf__find_by_name_kind.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32)
    btf = lib.btf__load_vmlinux_btf()
    if not btf or btf > 2**64 - 4096:
        return None
    number = lib.btf__find_by_name_kind(btf, structure.encode(), STRUCT)
    return walk(lib, btf, number, member.encode(), 0) if number > 0 else None


def walk(lib: ctypes.CDLL, btf: int, number: int, member: bytes, base: int) -> int | None:
    """Look through a struct and the anonymous structs in it (a randomised layout wraps the members in one)."""
    address = lib.btf__type_by_id(btf, number)
    head = BtfType.from_address(address)
    members = (BtfMember * (head.info & 0xFFFF)).from_address(address + ctypes.sizeof(BtfType))
    for entry in members:
        bits = entry.offset & 0xFFFFFF if head.info >> 31 else entry.offset
        name = lib.btf__name_by_offset(btf, entry.name)
        if name == member:
            return int(base + bits // 8)
        inner = lib.btf__type_by_id(btf, entry.type) if not name else None
        if inner and (BtfType.from_address(inner).info >> 24) & 0x1F == STRUCT:
            found = walk(lib, btf, entry.type, member, base + bits // 8)
            if found is not None:
                return found
    return None


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.argv[1])
    channel = socket.socket(fileno=request["socket"])
    answer: dict[str, Any] = {"ok": False, "error": "", "missing": []}
    descriptors: list[int] = []
    try:
        from bcc import BPF

        defines = dict(request["defines"])
        if request.get("task_offsets"):
            offset = member_offset("task_struct", "tgid")
            if offset is not None:
                defines["TASK_TGID"] = offset
        flags = ["-I" + request["include"], "-Wno-everything"] + [f"-D{name}={value}" for name, value in defines.items()]
        bpf = BPF(src_file=request["source"], cflags=flags)
        for name, (kind, attach_type, optional) in request["programs"].items():
            try:
                descriptors.append(bpf.load_func(name, kind, attach_type=attach_type).fd)
            except Exception as error:
                if not optional:
                    raise
                answer["missing"].append([name, str(error)])
        descriptors += [bpf[name].map_fd for name in request["maps"]]
        answer["ok"] = True
    except Exception as error:  # noqa: BLE001 - bcc raises bare Exception; whatever it is, the executor tells it in one line
        answer["error"] = f"{type(error).__name__}: {error}"
        descriptors = []
    data = json.dumps(answer).encode()[:60000]
    if descriptors:
        socket.send_fds(channel, [data], descriptors)
    else:
        channel.send(data)


main()
