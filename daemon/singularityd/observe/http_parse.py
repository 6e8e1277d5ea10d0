"""HTTP/1.1 requests without a body, and what their Accept headers ask for. Pure functions over bytes."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HEAD = 8192
"""Bytes of request line and headers."""

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]{1,4096}) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")


class Request(NamedTuple):
    """A request that may be answered."""

    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    """Names in lower case; what came several times is joined by commas."""
    keep_alive: bool


class Refusal(Exception):
    """Raised for a request that is answered by an error, after which the connection is closed: where it ends is not certain."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def parse(head: bytes) -> Request:
    """The request in a head that ends in an empty line. Raises Refusal 400 or 505 for anything else."""
    line, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Refusal(400, "the request line is not HTTP")
    method, target, major, minor = match.groups()
    if major != b"1":
        raise Refusal(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    headers = _headers(rest)
    if minor != b"0" and "host" not in headers:
        raise Refusal(400, "the Host header is missing")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise Refusal(400, "requests with a body are not served here")
    tokens = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    keep_alive = "close" not in tokens and (minor != b"0" or "keep-alive" in tokens)
    return Request(method.decode(), _path(target.decode()), headers, keep_alive)


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise Refusal(400, "a header line is not HTTP")
        name, value = match[1].decode().lower(), match[2].decode("latin-1")
        if name in headers and name in ("host", "content-length"):
            raise Refusal(400, f"the header {name} came twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _path(target: str) -> str:
    if target.startswith("/"):
        return target.split("?", 1)[0].split("#", 1)[0]
    try:
        url = urlsplit(target)
    except ValueError:
        raise Refusal(400, "the request target is not a URL") from None
    if url.scheme not in ("http", "https") or not url.netloc:
        raise Refusal(400, "the request target is not a path")
    return url.path or "/"


def wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics 1.0.0 is what the client likes best of the two formats; text where it says nothing."""
    best = {"openmetrics": 0.0, "text": 0.0}
    for kind, parameters, quality in _choices(accept):
        if kind == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
            best["openmetrics"] = max(best["openmetrics"], quality)
        elif kind == "text/plain":
            best["text"] = max(best["text"], quality)
    return best["openmetrics"] > 0 and best["openmetrics"] >= best["text"]


def wants_gzip(accept_encoding: str) -> bool:
    """Whether the client takes gzip."""
    choices = {kind: quality for kind, _, quality in _choices(accept_encoding)}
    return choices.get("gzip", choices.get("*", 0.0)) > 0


def _choices(header: str) -> list[tuple[str, dict[str, str], float]]:
    result = []
    for choice in header.split(","):
        kind, *pairs = (part.strip().lower() for part in choice.split(";"))
        parameters = {name.strip(): value.strip(' "') for name, _, value in (pair.partition("=") for pair in pairs)}
        result.append((kind, parameters, _quality(parameters.get("q", "1"))))
    return result


def _quality(text: str) -> float:
    return float(text) if re.fullmatch(r"[01](\.[0-9]{0,3})?", text) else 0.0
