"""What the daemon shows of a live job, by its real outlets: the page, OTLP, the log."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conftest import Daemon, Job, free_port, until
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Start = Callable[..., Job]


class Collector:
    """An OTLP receiver over HTTP."""

    def __init__(self) -> None:
        self.metrics: dict[str, int] = {}
        self.spans: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/metrics":
                    request = ExportMetricsServiceRequest.FromString(body)
                    for resource in request.resource_metrics:
                        for scope in resource.scope_metrics:
                            collector.metrics.update({metric.name: 1 for metric in scope.metrics})
                else:
                    traces = ExportTraceServiceRequest.FromString(body)
                    for resource in traces.resource_spans:
                        for scope in resource.scope_spans:
                            collector.spans += [span.name for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.port = free_port()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_metrics_and_one_span_of_a_fault_reach_an_otlp_collector(jobs: Start) -> None:
    collector = Collector()
    own = Daemon(
        "otel.enabled=true",
        'otel.protocol="http"',
        f'otel.endpoint="http://127.0.0.1:{collector.port}"',
        "otel.interval=1",
    ).start()
    try:
        job = jobs("steps.py", ranks=2)
        until(lambda: sorted(own.ranks(job.job)) == [0, 1] and len(job.steps(0)) > 3, 90)
        assert own.ctl("inject", "--rank", "1", "--job", job.job, "timeout", "--for", "1s", "--wait").returncode == 0
        until(lambda: any("fault" in name for name in collector.spans), 30)
        until(lambda: any("calls" in name for name in collector.metrics), 30)
    finally:
        own.stop()
        collector.close()
    assert sum("fault" in name for name in collector.spans) == 1


def test_the_page_of_a_live_job_is_clean(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py", ranks=2)
    until(lambda: sorted(daemon.ranks(job.job)) == [0, 1] and len(job.steps(0)) > 3, 90)
    page = daemon.page()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert str(daemon.ranks(job.job)[0]["pid"]) not in [word.strip('"') for line in page.splitlines() for word in line.split("=")]
    assert daemon.metric("singularity_rank_up", job_id=job.job) == 2


def test_the_log_is_one_json_object_a_line(daemon: Daemon) -> None:
    lines = daemon.log.read_text().splitlines()
    assert lines
    assert all({"time", "level", "event"} <= json.loads(line).keys() for line in lines)
