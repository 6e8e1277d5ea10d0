"""The settings of what this package shows to the outside; `config` puts them under `[metrics]`, `[otel]` and `[log]`.

Each field's documentation stands under it. Ranges are msgspec constraints, so that a wrong value is refused with its path.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

Level = Literal["debug", "info", "warning", "error"]

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Prometheus page."""

    enabled: bool = True
    """Serve the page at all."""
    host: str = "127.0.0.1"
    """Address to listen on. The page names jobs and faults and has no access control: open it to a network with care."""
    port: Port = 10610
    """TCP port; 0 takes a free one (the log names it)."""
    series: Positive = 20_000
    """Most series on one page; what is left out is counted in singularity_series_dropped_total."""
    label_length: Annotated[int, msgspec.Meta(ge=16, le=1024)] = 128
    """Longest label value in characters; a longer one is cut and ends in a hash of the whole."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """Most connections at once; one more is answered 503 and closed."""
    timeout: Seconds = 10.0
    """Seconds a client has for one request, and an idle connection before it is closed."""


class OtelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Export over OTLP; needs the extra: pip install 'singularityd[otel]'."""

    enabled: bool = False
    """Send metrics and spans to a collector."""
    protocol: Literal["grpc", "http"] = "grpc"
    """OTLP over gRPC, or protobuf over HTTP."""
    endpoint: str = "http://127.0.0.1:4317"
    """Where the collector listens. https:// means TLS. With `http`, /v1/metrics and /v1/traces are added to it."""
    ca_file: str = ""
    """PEM file of the authorities to trust for https://; empty: the system's."""
    headers: dict[str, str] = {}
    """Sent with each request, for example a tenant. Put secrets into `header_files`."""
    header_files: dict[str, str] = {}
    """Header name to a file that holds its value (one line), so that a token need not be in this file."""
    interval: Seconds = 15.0
    """Seconds between two exports of the metrics."""
    timeout: Seconds = 5.0
    """Seconds one export may take."""
    resource: dict[str, str] = {}
    """More resource attributes; service.name, service.version, service.instance.id and host.name are always set."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that contradict each other; msgspec turns it into a validation error with the path."""
        url = urlsplit(self.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"endpoint {self.endpoint!r} must be http://HOST:PORT or https://HOST:PORT")
        if self.ca_file and url.scheme != "https":
            raise ValueError("ca_file is set but the endpoint is http://, which has no TLS; write https:// or remove ca_file")
        if both := sorted({name.lower() for name in self.headers} & {name.lower() for name in self.header_files}):
            raise ValueError(f"header {both[0]!r} is in headers and in header_files; keep one")


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The daemon's own log, on standard error."""

    level: Level = "info"
    """Least level that is written: debug, info, warning or error. Can be changed at run time."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: coloured lines on a terminal, the journal with fields (SINGULARITY_EVENT and so on) under systemd, one JSON object a line
    otherwise."""
    burst: Positive = 10
    """At most so many lines of one event in `period`; the next line that is written counts those suppressed."""
    period: Seconds = 60.0
    """Seconds over which `burst` counts."""
