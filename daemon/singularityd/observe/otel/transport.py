"""The SDK's OTLP exporters, made from our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import grpc
import requests
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from singularityd.errors import ConfigError
from singularityd.observe.settings import OtelSettings


class Transport(NamedTuple):
    """Both exporters. Their calls block: worker thread only, except `shutdown`, which ends waiting calls."""

    metrics: MetricExporter
    spans: SpanExporter

    def shutdown(self) -> None:
        """Make a call that waits for a retry give up, and close the connections. Any thread."""
        self.metrics.shutdown()
        self.spans.shutdown()


def connect(settings: OtelSettings) -> Transport:
    """The exporters; they connect on first use. Raises ConfigError for a file that cannot be used."""
    headers = _headers(settings)
    return _grpc(settings, headers) if settings.protocol == "grpc" else _http(settings, headers)


def _grpc(settings: OtelSettings, headers: dict[str, str]) -> Transport:
    secure = settings.endpoint.startswith("https://")
    roots = _read("otel.ca_file", settings.ca_file) if settings.ca_file else None
    credentials = grpc.ssl_channel_credentials(root_certificates=roots) if secure else None
    pairs = tuple(headers.items())
    return Transport(
        GrpcMetrics(settings.endpoint, not secure, credentials, pairs, settings.timeout),
        GrpcSpans(settings.endpoint, not secure, credentials, pairs, settings.timeout),
    )


def _http(settings: OtelSettings, headers: dict[str, str]) -> Transport:
    if settings.ca_file:
        _read("otel.ca_file", settings.ca_file)
    base = settings.endpoint.rstrip("/")
    authorities = settings.ca_file or None
    return Transport(
        HttpMetrics(f"{base}/v1/metrics", authorities, headers=headers, timeout=settings.timeout, session=_Session()),
        HttpSpans(f"{base}/v1/traces", authorities, headers=headers, timeout=settings.timeout, session=_Session()),
    )


class _Session(requests.Session):
    """requests lets REQUESTS_CA_BUNDLE of the environment win over a session's own authorities; here the setting wins."""

    def merge_environment_settings(self, *arguments: Any, **named: Any) -> Any:
        """Called by requests for each request."""
        merged = super().merge_environment_settings(*arguments, **named)
        if isinstance(self.verify, str):
            merged["verify"] = self.verify
        return merged


def _headers(settings: OtelSettings) -> dict[str, str]:
    """All headers; gRPC demands lower case."""
    headers = {name.lower(): value for name, value in settings.headers.items()}
    for name, path in settings.header_files.items():
        value = _read(f"otel.header_files.{name}", path).decode("utf-8", "replace").strip()
        if not value or not value.isprintable():
            raise ConfigError(
                f"otel.header_files.{name}: {path} must hold one line of text", hint="the file holds the header's value alone"
            )
        headers[name.lower()] = value
    return headers


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}", hint="the front reads it as user singularityd") from None
