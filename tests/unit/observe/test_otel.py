import asyncio
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceServicer, add_MetricsServiceServicer_to_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer, add_TraceServiceServicer_to_server
from prometheus_client.parser import text_string_to_metric_families
from singularityd.errors import ConfigError
from singularityd.model import Event
from singularityd.observe import otel
from singularityd.observe.bus import Bus
from singularityd.observe.metrics import MetricsPage
from singularityd.observe.otel.convert import POINTS, batches, resource
from singularityd.observe.reading import Memory, read
from singularityd.observe.settings import MetricsSettings, OtelSettings
from structlog.testing import capture_logs

from .samples import fixed, large

NOT_COMPARED = {"singularity_scrape_duration_seconds"}  # it tells of the page itself


class Received:
    """What a receiver got, whatever way."""

    def __init__(self):
        self.metrics, self.spans, self.headers = [], [], []

    def take(self, request, headers):
        self.headers.append({name.lower(): value for name, value in headers})
        if isinstance(request, ExportMetricsServiceRequest):
            self.metrics.append(request)
        else:
            self.spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]


class Grpc:
    def __init__(self, received, tls=None, port=0):
        class Metrics(MetricsServiceServicer):
            def Export(self, request, context):
                received.take(request, context.invocation_metadata())
                return ExportMetricsServiceResponse()

        class Spans(TraceServiceServicer):
            def Export(self, request, context):
                received.take(request, context.invocation_metadata())
                return ExportTraceServiceResponse()

        self.server = grpc.server(ThreadPoolExecutor(2))
        add_MetricsServiceServicer_to_server(Metrics(), self.server)
        add_TraceServiceServicer_to_server(Spans(), self.server)
        address = f"127.0.0.1:{port}"
        if tls:
            credentials = grpc.ssl_server_credentials([(tls[1].read_bytes(), tls[0].read_bytes())])
            self.port = self.server.add_secure_port(address, credentials)
        else:
            self.port = self.server.add_insecure_port(address)
        self.server.start()

    def close(self):
        self.server.stop(None).wait()


class Http:
    def __init__(self, received, tls=None):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                kind = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}[self.path]
                received.take(kind.FromString(self.rfile.read(int(self.headers["Content-Length"]))), self.headers.items())
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 and its key."""
    where = tmp_path_factory.mktemp("tls")
    made = where / "certificate.pem", where / "key.pem"
    subject = ("-subj", "/CN=collector", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1")
    how = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run(["openssl", *how, *subject, "-out", made[0], "-keyout", made[1]], check=True, capture_output=True, timeout=30)
    return made


@pytest.fixture(autouse=True)
def forgetful_sdk():
    """The SDK drops a message that it has logged in the last 20 s, of whatever exporter; here each test is a new process."""
    for one in logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters:
        one.last_log = None


class Front:
    """What an exporter needs of the front."""

    def __init__(self, snapshot):
        self.snapshot = snapshot
        self.bus = Bus()
        self.pages = MetricsPage(self.take)

    async def take(self):
        return self.snapshot

    def exporter(self, **settings):
        made = otel.create(OtelSettings(enabled=True, **settings), reading=self.pages.reading, bus=self.bus)
        assert made is not None
        return made


async def until(condition, seconds=10):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def flatten(requests):
    """{(sample name, labels): value}, as a Prometheus page has them."""
    result = {}
    for metric in (m for r in requests for rm in r.resource_metrics for s in rm.scope_metrics for m in s.metrics):
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = {a.key: a.value.string_value for a in point.attributes}
            if kind != "histogram":
                result[metric.name, frozenset(labels.items())] = getattr(point, point.WhichOneof("value"))
                continue
            assert not point.HasField("min")
            total = 0
            for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
                total += count
                result[f"{metric.name}_bucket", frozenset({**labels, "le": bound}.items())] = total
            result[f"{metric.name}_count", frozenset(labels.items())] = point.count
            result[f"{metric.name}_sum", frozenset(labels.items())] = point.sum
    return result


def page_values(page):
    return {
        (s.name, frozenset((name, float(v) if name == "le" else v) for name, v in s.labels.items())): s.value
        for family in text_string_to_metric_families(page.decode())
        for s in family.samples
        if s.name not in NOT_COMPARED
    }


def comparable(values):
    return {key: str(float(v)) for key, v in values.items() if key[0] not in NOT_COMPARED}  # as text: NaN equals NaN


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_the_receiver_gets_what_the_page_shows_and_a_span_each(protocol, tls, certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/ssl/certs/ca-certificates.crt")  # of the environment; the setting must win
    received = Received()
    receiver = {"grpc": Grpc, "http": Http}[protocol](received, certificate if tls else None)
    token = tmp_path / "token"
    token.write_text("Bearer s3cret\n")
    front = Front(fixed())
    exporter = front.exporter(
        protocol=protocol,
        endpoint=f"http{'s' if tls else ''}://127.0.0.1:{receiver.port}",
        ca_file=str(certificate[0]) if tls else "",
        headers={"X-Tenant": "blue"},
        header_files={"Authorization": str(token)},
        resource={"cluster": "c1"},
    )
    await exporter.start()
    front.bus.publish(
        Event(kind="rank_exited", at=time.time(), text="rank 12 exited", job="train", rank=12, pid=104, fields={"reason": "code 1"})
    )
    await until(lambda: received.metrics and len(received.spans) == 3)
    page = await front.pages.page()
    await exporter.stop()
    receiver.close()
    assert comparable(flatten(received.metrics[:1])) == comparable(page_values(page.body))
    for headers in received.headers:
        assert (headers["x-tenant"], headers["authorization"]) == ("blue", "Bearer s3cret")
    attributes = {a.key: a.value.string_value for a in received.metrics[0].resource_metrics[0].resource.attributes}
    assert (attributes["service.name"], attributes["cluster"]) == ("singularityd", "c1")
    check_spans(received.spans)
    await front.pages.close()


def check_spans(spans):
    by_name = {}
    for span in spans:
        attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
        by_name[attributes.get("singularity.fault", span.name)] = (span, attributes)
    assert set(by_name) == {"f9", "f11", "singularity.rank"}, "ended and refused faults, and the exit; not the armed one"
    span, attributes = by_name["f9"]
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_000_000_000, 9_000_000_000)
    assert (attributes["singularity.hits"], attributes["singularity.rank"]) == (4, 0)
    span, attributes = by_name["singularity.rank"]
    assert attributes["singularity.reason"] == "code 1"
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.end_time_unix_nano - span.start_time_unix_nano > 10**9, "from the start of the process, by its ticks after boot"
    assert len({span.trace_id for span in spans}) == 1, "one job, one trace"
    assert len({span.span_id for span in spans}) == len(spans)


async def test_untrusted_certificate_is_not_spoken_to(certificate):
    received = Received()
    receiver = Grpc(received, certificate)
    front = Front(fixed())
    exporter = front.exporter(endpoint=f"https://127.0.0.1:{receiver.port}", timeout=0.5)
    with capture_logs() as logs:
        await exporter.start()
        await until(lambda: logs)
        await exporter.stop()
    receiver.close()
    assert [log["event"] for log in logs] == ["otel_not_delivered"]
    assert not received.headers


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def test_receiver_away_and_back_is_one_line_each_and_no_span_lost():
    port = free_port()
    front = Front(fixed())
    exporter = front.exporter(endpoint=f"http://127.0.0.1:{port}", interval=0.1, timeout=0.3)
    received = Received()
    with capture_logs() as logs:
        await exporter.start()
        await until(lambda: logs)
        await asyncio.sleep(1)
        assert [log["event"] for log in logs] == ["otel_not_delivered"], "once, not each interval"
        assert "UNAVAILABLE" in logs[0]["reason"]
        receiver = Grpc(received, port=port)
        await until(lambda: len(logs) > 1)
        await exporter.stop()
    receiver.close()
    assert [log["event"] for log in logs] == ["otel_not_delivered", "otel_delivered"]
    assert len(received.spans) == 2, "each fault once"


async def test_stop_sends_what_is_left():
    received = Received()
    receiver = Grpc(received)
    front = Front(fixed())
    exporter = front.exporter(endpoint=f"http://127.0.0.1:{receiver.port}", interval=3600)
    await exporter.start()
    await until(lambda: received.metrics)
    before = len(received.spans)
    front.snapshot = msgspec.structs.replace(front.snapshot, faults=(msgspec.structs.replace(front.snapshot.faults[2], id="f77"),))
    front.bus.publish(Event(kind="rank_exited", at=5.0, text="rank 3 exited", job="train", rank=3, pid=99999))
    await exporter.stop()
    await exporter.stop()
    receiver.close()
    assert len(received.spans) == before + 2
    assert len(received.metrics) == 2


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_receiver_that_never_answers_delays_nobody(protocol):
    """Neither the loop while exporting, nor the stop beyond the time-out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        front = Front(fixed())
        exporter = front.exporter(protocol=protocol, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=1, interval=0.1)
        loop = asyncio.get_running_loop()
        await exporter.start()
        lags = []
        for _ in range(100):
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            lags.append(loop.time() - due)
        assert sorted(lags)[50] < 0.02
        began = loop.time()
        await exporter.stop()
        assert loop.time() - began < 2.5


def test_requests_stay_below_a_collectors_limit():
    reading = read(large(), MetricsSettings(), Memory())
    requests = list(batches(reading, resource({}), 2e9))
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

    encoded = [encode_metrics(request) for request in requests]
    assert len(encoded) > 1
    assert all(request.ByteSize() < 4 << 20 for request in encoded)
    sizes = [sum(len(m.data.data_points) for m in r.resource_metrics[0].scope_metrics[0].metrics) for r in requests]
    assert set(sizes[:-1]) == {POINTS}
    assert sum(sizes) == sum(len(series) for _, series in reading.families)


def test_off_imports_nothing():
    code = (
        "import sys; from singularityd.observe import otel; from singularityd.observe.settings import OtelSettings; "
        "assert otel.create(OtelSettings(), reading=None, bus=None) is None; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


async def test_missing_extra_is_a_config_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "singularityd.observe.otel.exporter", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics.export", None)
    with pytest.raises(ConfigError) as error:
        otel.create(OtelSettings(enabled=True), reading=None, bus=Bus())
    assert "singularityd[otel]" in error.value.hint
    assert error.value.exit_code == 78


async def test_files_that_cannot_be_used(tmp_path):
    (tmp_path / "two").write_text("a\nb\n")
    for settings in (
        {"endpoint": "https://c:1", "ca_file": "/no/such"},
        {"header_files": {"x": "/no/such"}},
        {"header_files": {"x": str(tmp_path / "two")}},
    ):
        with pytest.raises(ConfigError, match=r"otel\.(ca_file|header_files\.x)"):
            Front(fixed()).exporter(**settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "collector:4317"},
        {"endpoint": "http://c:1", "ca_file": "/x"},
        {"headers": {"A": "1"}, "header_files": {"a": "/x"}},
        {"timeout": 0},
        {"protocol": "udp"},
    ],
)
def test_settings_refuse_nonsense(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, OtelSettings)
