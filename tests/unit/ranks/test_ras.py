"""The RAS client against a server that talks as NCCL's does, and as it should not."""

import asyncio
import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.ranks.ras import RasPoller, RasRank, local_addresses, parse


def member(rank, host="10.0.0.1", pid=None):
    return {
        "rank": rank,
        "host": host,
        "pid": 1000 + rank if pid is None else pid,
        "cuda_dev": rank,
        "nvml_dev": rank,
        "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False},
        "collective_counts": {"Broadcast": 0, "AllReduce": 12},
    }


def document(*ranks, missing=(), size=4):
    comm = {
        "hash": "0xAE94423cfbb2ef4a",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": size,
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing),
        "ranks": list(ranks),
        "missing_ranks": list(missing),
    }
    return {"nccl_version": "2.29.2", "communicators_count": 1, "communicators": [comm], "ras": {"timeouts_count": 0}}


HERE = {"10.0.0.1", "127.0.0.1"}
TWO = [RasRank(1000, "ae94423c", 0, 4), RasRank(1001, "ae94423c", 1, 4)]


@contextlib.asynccontextmanager
async def service(talk):
    """A server on a free port; yields a poller for it and the lines that it was sent."""
    heard = []

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await talk(reader, writer, heard)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield RasPoller("127.0.0.1", server.sockets[0].getsockname()[1], 1.0, addresses=lambda: HERE), heard
    finally:
        server.close()


def nccl(body, *, protocol=2, pieces=1):
    """The conversation of NCCL's own client, from the server's side."""

    async def talk(reader, writer, heard):
        while line := (await reader.readline()).decode().strip():
            heard.append(line)
            if line.startswith("CLIENT PROTOCOL"):
                writer.write(f"SERVER PROTOCOL {protocol}\n".encode())
            elif line.endswith("STATUS"):
                for at in range(pieces):
                    writer.write(body[at * len(body) // pieces : (at + 1) * len(body) // pieces])
                    await writer.drain()
                    await asyncio.sleep(0)
                return
            else:
                writer.write(b"OK\n")

    return talk


@pytest.mark.parametrize("protocol", [2, 3])
async def test_the_ranks_of_this_host(protocol):
    body = json.dumps(document(member(0), member(2, host="10.0.0.2"), missing=[member(1)]), indent=2).encode()
    async with service(nccl(body, protocol=protocol, pieces=7)) as (poller, heard):
        assert await poller.poll() == TWO
    assert heard[0] == "CLIENT PROTOCOL 2"
    assert heard[-2:] == ["SET FORMAT json", "VERBOSE STATUS"]


async def refuses_json(reader, writer, _heard):
    await reader.readline()
    writer.write(b"SERVER PROTOCOL 2\n")
    await reader.readline()
    writer.write(b"OK\n")
    await reader.readline()
    writer.write(b"ERROR: Unknown command\n")


async def hangs_up(_reader, _writer, _heard):
    pass


async def another_service(_reader, writer, _heard):
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def no_line_end(_reader, writer, _heard):
    writer.write(b"x" * 100_000)
    await writer.drain()


@pytest.mark.parametrize("talk", [refuses_json, hangs_up, another_service, no_line_end])
async def test_what_is_no_service_with_json_gives_nothing(talk):
    async with service(talk) as (poller, _):
        assert await poller.poll() == []


async def test_nobody_listens():
    async with service(hangs_up) as (poller, _):
        pass
    assert await poller.poll() == []


async def test_a_silent_service_costs_no_more_than_the_limit():
    async def silent(_reader, _writer, _heard):
        await asyncio.sleep(30)

    async with service(silent) as (poller, _):
        began = time.monotonic()
        assert await poller.poll() == []
        assert time.monotonic() - began < 5


async def test_an_endless_answer_ends():
    async def endless(reader, writer, heard):
        await nccl(b"")(reader, writer, heard)
        while True:
            writer.write(b" " * 65536)
            await writer.drain()

    async with service(endless) as (poller, _):
        assert await poller.poll() == []


def test_nccl_2_28_9_leaves_out_a_comma():
    text = json.dumps(document(member(0), missing=[member(1)]), indent=2)
    broken = text.replace('"nvml_dev": 1,', '"nvml_dev": 1')
    assert broken != text
    assert parse(broken.encode(), HERE) == TWO


def test_members_that_name_no_process_of_this_host_are_left_out():
    odd = [
        member(0, host="10.0.0.2"),
        member(0, host=None),
        member(0, pid=0),
        member(0, pid=-4),
        member(0, pid="12"),
        member(0) | {"rank": True},
        member(4),
        "text",
        None,
    ]
    assert parse(json.dumps(document(*odd, member(1))).encode(), HERE) == TWO[1:]
    assert parse(json.dumps(document(member(0, host=""))).encode(), {""}) == []


def test_an_address_is_the_same_however_written():
    assert len(parse(json.dumps(document(member(0, host="fe80:0::1%eth0"))).encode(), {"fe80::1"})) == 1


def test_this_host_has_addresses():
    assert local_addresses() & {"127.0.0.1", "::1"}


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data):
    assert parse(data, HERE) == []


KEYS = ["communicators", "ranks", "missing_ranks", "hash", "size", "rank", "pid", "host"]
leaves = st.none() | st.booleans() | st.integers(-5, 2000) | st.text(max_size=5)


@given(
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["communicators", "ranks", "missing_ranks", "hash", "size", "rank", "pid", "host"]), inner, max_size=5
            )
        ),
        max_leaves=20,
    )
)
def test_no_document_breaks_the_parser(value):
    for rank in parse(json.dumps(value).encode(), HERE):
        assert 0 <= rank.rank < rank.size


def test_a_deep_document_is_no_document():
    assert parse(b"[" * 200_000, HERE) == []
