"""The client's side of token.sock. Blocking, standard library only: the agent uses it too."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from singularityd import errors

METADATA = "singularity-token"
"""The key under which a call carries its token."""
TOKEN_SOCKET = "token.sock"  # noqa: S105 - a file's name
_LARGEST = 16 << 10


def fetch(beside: str, timeout: float) -> str:
    """A token for the socket at that path, from the token.sock in its directory; empty where the daemon has none.

    Raises Busy and Unauthenticated, as the daemon answered.
    """
    directory, name = os.path.split(beside)
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(timeout)
            peer.connect(os.path.join(directory, TOKEN_SOCKET))
            peer.sendall(name.removesuffix(".sock").encode() + b"\n")
            answer = _line(peer)
    except OSError:
        return ""  # the call itself says what is wrong with the daemon
    try:
        said = json.loads(answer)
    except ValueError:
        return ""
    return _token(said)


def _line(peer: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < _LARGEST:
        more = peer.recv(_LARGEST)
        if not more:
            break
        found += more
    return found


def _token(said: Any) -> str:
    if not isinstance(said, dict):
        return ""
    if (token := said.get("token")) is not None:
        return str(token)
    text, hint = str(said.get("error", "")), str(said.get("hint", ""))
    kind = errors.Busy if said.get("code") == errors.Busy.code else errors.Unauthenticated
    raise kind(text, hint=hint)
