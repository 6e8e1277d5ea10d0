import asyncio
import contextlib
import gzip
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.errors import AddressInUse, ConfigError
from singularityd.observe.http import MetricsServer
from singularityd.observe.http_parse import Refusal, parse, wants_gzip, wants_openmetrics
from singularityd.observe.metrics import Page
from structlog.testing import capture_logs

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Pages:
    """Stands for MetricsPage."""

    def __init__(self):
        self.asked = 0
        self.problem = None
        self.body = b"one 1\n"

    async def page(self, *, openmetrics, compress):
        self.asked += 1
        if self.problem:
            raise self.problem
        body = gzip.compress(self.body) if compress else self.body
        return Page(body, OPENMETRICS if openmetrics else "text/plain", "gzip" if compress else "")


@pytest.fixture
def pages():
    return Pages()


@pytest.fixture
def health():
    return [True, "ok  link"]


@pytest.fixture
async def server(pages, health):
    server = MetricsServer("127.0.0.1", 0, pages.page, lambda: tuple(health), connections=4, timeout=0.5)
    await server.start()
    yield server
    await asyncio.wait_for(server.stop(), 3)


async def talk(server, data, *, close=True):
    """Everything the server answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    if close:
        writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def get(path="/metrics", method="GET", **headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode()


def status(answer):
    return int(answer.split(b" ", 2)[1])


async def test_pages(server, health):
    answer = await talk(server, get())
    assert status(answer) == 200
    assert answer.endswith(b"\r\n\r\none 1\n")
    assert b"Content-Length: 6\r\n" in answer
    assert status(await talk(server, get("/healthz"))) == 200
    health[:] = [False, "BAD link: gone"]
    answer = await talk(server, get("/healthz"))
    assert status(answer) == 503
    assert b"BAD link: gone" in answer
    assert b'href="/metrics"' in await talk(server, get("/"))
    assert status(await talk(server, get("/metrics?name[]=x"))) == 200
    assert status(await talk(server, get("http://x/metrics"))) == 200


async def test_head_has_the_length_and_no_body(server):
    answer = await talk(server, get(method="HEAD"))
    assert b"Content-Length: 6\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_formats(server):
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"
    answer = await talk(server, get(Accept=accept, Accept_Encoding="gzip"))
    head, body = answer.split(b"\r\n\r\n", 1)
    assert f"Content-Type: {OPENMETRICS}".encode() in head
    assert b"Content-Encoding: gzip" in head
    assert gzip.decompress(body) == b"one 1\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (get("/nothing"), 404),
        (get(method="POST"), 405),
        (get(method="BREW"), 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost:", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
async def test_bad_requests(server, pages, data, expected):
    assert status(await talk(server, data)) == expected
    assert pages.asked == 0
    assert status(await talk(server, get())) == 200, "the server goes on"


async def test_405_names_what_is_allowed(server):
    assert b"Allow: GET, HEAD\r\n" in await talk(server, get(method="PUT"))


async def test_keep_alive_and_pipelining(server, pages):
    one = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    assert (await talk(server, one * 3)).count(b"HTTP/1.1 200 OK") == 3
    assert (await talk(server, b"GET /metrics HTTP/1.0\r\n\r\n" * 2)).count(b"HTTP/1.1 200 OK") == 1
    assert pages.asked == 4


async def test_a_silent_client_is_told_and_closed(server):
    answer = await talk(server, b"GET /metrics HT", close=False)
    assert status(answer) == 408


async def test_a_client_that_does_not_read_is_dropped(server, pages):
    pages.body = b"x" * 50_000_000
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1000)
    writer.write(get())
    await asyncio.sleep(1.2)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(50_000_000), 5)
    writer.close()


async def test_too_many_connections(server):
    opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert status(await talk(server, b"", close=False)) == 503
    for _, writer in opened:
        writer.close()
    await asyncio.sleep(0.1)
    assert status(await talk(server, get())) == 200


async def test_a_page_that_fails_is_a_500_and_one_log_line(server, pages):
    pages.problem = ValueError("boom")
    with capture_logs() as logs:
        assert status(await talk(server, get())) == 500
    assert [log["event"] for log in logs] == ["page_failed"]
    pages.problem = None
    assert status(await talk(server, get())) == 200


async def test_port_taken(pages):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = MetricsServer("127.0.0.1", port, pages.page, lambda: (True, ""))
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}") as error:
            await server.start()
    assert error.value.exit_code == 69
    assert str(port) in error.value.hint
    await server.stop()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
async def test_address_of_another_machine(pages, host):
    with pytest.raises(ConfigError, match="metrics"):
        await MetricsServer(host, 0, pages.page, lambda: (True, "")).start()


async def test_stop_ends_idle_connections_at_once(pages):
    server = MetricsServer("127.0.0.1", 0, pages.page, lambda: (True, ""))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(server.stop(), 2)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 1) == b""
    writer.close()


@given(st.binary(max_size=300))
def test_parser_answers_or_refuses(data):
    try:
        outcome = parse(data + b"\r\n\r\n").path
    except Refusal as refusal:
        outcome = refusal.status
    assert outcome in (400, 505) or outcome.startswith("/")


token = st.text("abcdefgXYZ-0123456789", min_size=1, max_size=10)


@given(
    token.filter(lambda t: t.lower() not in ("host", "connection", "content-length", "transfer-encoding")),
    st.text("abc ,;=/*", max_size=20),
)
def test_parser_reads_back_what_was_written(name, value):
    request = parse(f"GET /a?b#c HTTP/1.1\r\nhOsT: x\r\n{name}:  {value}\t\r\n\r\n".encode())
    assert (request.method, request.path, request.keep_alive) == ("GET", "/a", True)
    assert request.headers[name.lower()] == value.strip(" ")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=0.0.1", False),
        ("application/openmetrics-text;version=1.0.0;q=0.5, text/plain;q=0.4", True),
        ("application/openmetrics-text;version=1.0.0;q=0.3, text/plain;q=0.4", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", False),
    ],
)
def test_accept(accept, expected):
    assert wants_openmetrics(accept) is expected


@pytest.mark.parametrize(("header", "expected"), [("", False), ("gzip", True), ("gzip;q=0", False), ("br, *", True), ("deflate", False)])
def test_accept_encoding(header, expected):
    assert wants_gzip(header) is expected
