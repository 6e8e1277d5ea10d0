import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.errors import BadOption, UnknownPattern, UsageError
from singularityd.faults import options, points, quantity, results, spec, telling
from singularityd.faults.patterns import PATTERNS
from singularityd.kernel import abi, libraries
from singularityd.model import FaultSpec, Library, Rank


def parse(options=(), pattern="timeout", rank=3, **rest):
    return spec.parse(pattern, rank, options, **rest)


def refusal(*arguments, **rest):
    with pytest.raises(UsageError) as caught:
        parse(*arguments, **rest)
    return caught.value


def test_defaults_are_those_of_the_contract():
    assert parse() == FaultSpec(pattern="timeout", rank=3)
    assert parse().duration == 10.0
    assert parse().probability == 100.0


def test_the_customers_triple():
    asked = parse({"point": "ncclAllReduce", "ms": "500", "probability": "25%"}, duration="5s")
    assert (asked.point, asked.backend, asked.milliseconds, asked.probability) == ("allreduce", "nccl", 500, 25.0)


@pytest.mark.parametrize(
    ("text", "expected"), [("500ms", 500), ("5s", 5000), ("2m", 120_000), ("1.5s", 1500), ("0.001s", 1), ("24m", 1_440_000), ("05s", 5000)]
)
def test_durations(text, expected):
    assert quantity.milliseconds("duration", text) == expected
    assert parse(duration=text).duration == expected / 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("5", "write 5s for seconds or 5ms"),
        ("0", "unit"),
        ("0s", "longer than 0"),
        ("-5s", "longer than 0"),
        ("1.5ms", "finer than 1 ms"),
        ("0.0001s", "finer than 1 ms"),
        ("25h", "500ms, 5s, 1.5s or 2m"),
        ("1441m", "24 hours"),
        ("9" * 20 + "m", "24 hours"),
        ("9" * 5000 + "s", "not a duration"),
        ("5 s", "without a space"),
        (" 5s", "without a space"),
        ("5s\n", "without a space"),
        ("٥s", "not a duration"),
        ("５s", "not a duration"),
        ("nan", "not a duration"),
        ("infs", "not a duration"),
        ("1e3s", "not a duration"),
        ("5S", "not a duration"),
        ("1_000ms", "not a duration"),
        (".5s", "not a duration"),
    ],
)
def test_durations_refused_with_a_remedy(text, told):
    error = refusal(duration=text)
    assert isinstance(error, BadOption)
    assert told in f"{error.text} {error.hint}"
    assert len(error.text) < 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [("25%", 25.0), ("25", 25.0), ("0.5%", 0.5), ("100", 100.0), ("100%", 100.0), ("0.0001%", 0.0001), ("33.3333%", 33.3333)],
)
def test_probabilities(text, expected):
    assert parse({"probability": text}).probability == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "more than 0"),
        ("0%", "more than 0"),
        ("101%", "more than 100"),
        ("100.0001", "more than 100"),
        ("-5%", "more than 0"),
        ("0.00001%", "finer"),
        ("33.33333%", "finer"),
        ("0.5", "0.5%"),
        ("1", "100%"),
        ("nan", "percentage"),
        ("inf%", "percentage"),
        ("25 %", "percentage"),
        ("٢٥%", "percentage"),
        ("", "percentage"),
        ("25%%", "percentage"),
    ],
)
def test_probabilities_refused(text, told):
    error = refusal({"probability": text})
    assert told in f"{error.text} {error.hint}"


def test_hold_takes_a_number_or_a_duration_and_not_more_than_the_faults_life():
    assert parse({"ms": "500"}).milliseconds == 500
    assert parse({"ms": "2s"}).milliseconds == 2000
    for text in ("0", "0ms", "-1", "1.5", "٥", "", "500 ms"):
        refusal({"ms": text})
    error = refusal({"ms": "20s"})
    assert "--for 20s" in error.hint
    assert parse({"ms": "20s"}, duration="20s").milliseconds == 20_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("any", ("any", "")),
        ("allreduce", ("allreduce", "")),
        ("ncclAllReduce", ("allreduce", "nccl")),
        ("pncclAllReduce", ("allreduce", "nccl")),
        ("ncclAllReduceConfig", ("allreduce", "nccl")),
        ("ncclCommInitRank", ("comm_init", "nccl")),
        ("gloo::allreduce", ("allreduce", "gloo")),
        ("gloo::allgatherv", ("allgather", "gloo")),
        ("gloo::transport::tcp::UnboundBuffer::send", ("send", "gloo")),
        ("nccl::allreduce", ("allreduce", "nccl")),
    ],
)
def test_points(text, expected):
    assert points.resolve(text) == expected
    asked = parse({"point": text})
    assert (asked.point, asked.backend) == expected


def test_every_operation_with_a_site_is_a_point_and_nothing_else_is():
    reachable = set(abi.OPS.values()) - {"other"}
    assert set(points.operations()) == reachable
    for op in reachable:
        assert parse({"point": op}).point == op
    assert "other" in refusal({"point": "other"}).text


def test_each_entry_symbol_of_each_library_is_a_point():
    for table in libraries.tables():
        symbols = [name.decode() for name in table.exact] or list(points._NCCL)
        sites = table.sites({name: place for place, name in enumerate(symbols)}, "")
        assert {site.symbol for site in sites} == set(symbols), "a suggested name that the library's table does not know"
        for site in sites:
            if site.site.kind in (abi.SITE_CALL, abi.SITE_POST):
                assert points.resolve(points._demangled(site.symbol)) == (abi.OPS[site.site.op], table.backend)


@pytest.mark.parametrize(
    ("text", "near"),
    [("allredcue", "allreduce"), ("ncclAllredcue", "ncclAllReduce"), ("AllReduce", "allreduce"), ("gloo::alreduce", "gloo::allreduce")],
)
def test_unknown_points_suggest_the_nearest_and_list_all(text, near):
    error = refusal({"point": text})
    assert f"did you mean {near}?" in error.hint
    assert "allowed: any, allreduce" in error.hint


def test_contradictions_between_options():
    assert "another library" in refusal({"point": "ncclAllReduce", "backend": "gloo"}).text
    assert "another library" in refusal({"backend": "gloo", "point": "ncclAllReduce"}).text
    assert "gloo has no call comm_init" in refusal({"backend": "gloo", "point": "comm_init"}).text
    assert "nccl has no call barrier" in refusal({"backend": "nccl", "point": "barrier"}).text
    assert parse({"point": "ncclAllReduce", "backend": "nccl"}).backend == "nccl"


def test_keys():
    assert "did you mean probability?" in refusal({"probabilty": "25%"}).hint
    assert "--for" in refusal({"duration": "5s"}).hint
    assert "given twice" in refusal([("ms", "5"), ("ms", "5")]).text
    assert "has no option ''" in refusal({"": "1"}).text
    assert spec.pairs(["ms=5", "point=a=b"]) == [("ms", "5"), ("point", "a=b")]
    with pytest.raises(BadOption, match="no value"):
        spec.pairs(["ms"])


def test_patterns_that_are_not():
    error = refusal(pattern="tiemout")
    assert isinstance(error, UnknownPattern)
    assert "did you mean timeout?" in error.hint


@pytest.mark.parametrize("rank", [-1, 2**31, True, pytest.param(10**5000, id="huge")])
def test_ranks_refused(rank):
    assert "global rank" in refusal(rank=rank).hint


def test_free_texts_are_one_short_printable_line():
    for bad in ("a\nb", "\x1b[31m", "\ud800", "x" * 2000):
        refusal(reason=bad)
        refusal(job=bad)
    assert parse(reason="rehearsal of Größe ✓").reason == "rehearsal of Größe ✓"


def test_counts_and_seeds():
    assert parse({"count": "3", "seed": "0"}).count == 3
    for key, text in itertools.product(("count", "seed"), ("-1", "x", "1.0", "", "٣", "9" * 31, str(2**64))):
        assert "whole number" in refusal({key: text}).hint
    assert "1 to" in refusal({"count": "0"}).hint


def test_the_pattern_says_what_its_backends_tables_allow():
    for pattern in PATTERNS:
        allowing = {table.backend for table in libraries.tables() if pattern.name in table.faults}
        assert set(pattern.backends) == allowing


words = st.text(max_size=30) | st.sampled_from(["timeout", "5s", "25%", "any", "allreduce", "gloo", "500", "1e400s", "0x5", "+5s"])
keys = words | st.sampled_from([option.name for pattern in PATTERNS for option in pattern.options])
patterns = words | st.sampled_from([pattern.name for pattern in PATTERNS])


@given(
    pattern=patterns,
    rank=st.integers(),
    given_options=st.lists(st.tuples(keys, words), max_size=4),
    job=words,
    duration=words,
    reason=words,
)
def test_parse_answers_or_refuses_as_usage(pattern, rank, given_options, job, duration, reason):
    try:
        asked = spec.parse(pattern, rank, given_options, job=job, duration=duration, reason=reason)
    except UsageError:
        return
    assert asked.rank == rank
    assert msgspec.json.decode(msgspec.json.encode(asked), type=FaultSpec) == asked


VALUES = {
    "point": st.sampled_from(["any", "allreduce", "ncclAllReduce", "gloo::allreduce", "comm_init", "barrier"]),
    "backend": st.sampled_from(list(abi.BACKEND_CODES)),
    "ms": st.integers(1, 10_000).map(str) | st.sampled_from(["1s", "250ms"]),
    "jitter": st.integers(1, 10_000).map(str),
    "distribution": st.sampled_from(["fixed", "uniform", "normal", "exponential"]),
    "mode": st.sampled_from(["hold", "return"]),
    "code": st.sampled_from(["2", "6", "ncclSystemError", "ncclTimeout", "timeout", "-ETIMEDOUT", "-110"]),
    "probability": st.integers(1, quantity.PPM).map(quantity.percent_text),
    "after": st.integers(1, options.LARGEST_COUNT).map(str),
    "count": st.integers(1, options.LARGEST_COUNT).map(str),
    "seed": st.integers(0, options.LARGEST_SEED).map(str),
    "on": st.sampled_from(["1s", "20ms", "9s"]),
    "off": st.sampled_from(["1s", "20ms", "9s"]),
    "percent": st.integers(20_000, quantity.PPM - 1).map(quantity.percent_text),
    "period": st.integers(options.SHORTEST_PERIOD, options.LONGEST_PERIOD).map(lambda value: f"{value}ms"),
}


@st.composite
def requests(draw):
    """Any pattern with any of its options, each by itself allowed."""
    pattern = draw(st.sampled_from(PATTERNS))
    names = draw(st.lists(st.sampled_from([option.name for option in pattern.options]), unique=True)) if pattern.options else []
    return pattern, {name: draw(VALUES[name]) for name in names}


def test_every_option_has_values_here():
    assert {option.name for pattern in PATTERNS for option in pattern.options} == set(VALUES)


@given(requests(), st.integers(0, spec.LARGEST_RANK), st.integers(1, quantity.LONGEST_MS), st.text("a ü", max_size=5))
def test_render_round_trips_exactly(asked, rank, duration, reason):
    pattern, given = asked
    try:
        first = spec.parse(pattern.name, rank, given, duration=quantity.duration_text(duration), reason=reason)
    except BadOption:
        return  # options that contradict each other
    request = spec.render(first)
    again = spec.parse(*request[:3], job=request.job, duration=request.duration, reason=request.reason)
    assert again == first
    assert round(again.probability * 10_000) == round(first.probability * 10_000)
    assert telling.calls(first)


@pytest.mark.parametrize("pattern", [pattern.name for pattern in PATTERNS])
def test_every_pattern_needs_no_option(pattern):
    assert parse(pattern=pattern).pattern == pattern


def test_only_libraries_with_results_can_return_one():
    assert parse(pattern="error").backend == "nccl"
    assert parse({"mode": "return"}).backend == "nccl"
    for error in (
        refusal({"backend": "gloo"}, pattern="error"),
        refusal({"point": "gloo::allreduce"}, pattern="error"),
        refusal({"backend": "gloo", "mode": "return"}),
    ):
        assert "return void and throw" in error.text
        assert all(name in error.hint for name in ("timeout", "delay", "hang", "kill"))
        assert "error" not in error.hint


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ncclSystemError", "ncclSystemError"),
        ("6", "ncclRemoteError"),
        ("timeout", "timeout"),
        ("-ETIMEDOUT", "timeout"),
        ("ETIMEDOUT", "timeout"),
        ("-110", "timeout"),
        ("-EINVAL", "ncclInvalidArgument"),
    ],
)
def test_codes(text, name):
    assert parse({"code": text}, pattern="error").result == name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "unreduced"),
        ("ncclSuccess", "unreduced"),
        ("ok", "unreduced"),
        ("ncclSytemError", "did you mean ncclSystemError?"),
        ("99", "ncclRemoteError (6)"),
        ("-1", "allowed"),
        ("-9999", "allowed"),
        ("", "allowed"),
    ],
)
def test_codes_refused(text, told):
    error = refusal({"code": text}, pattern="error")
    assert told in f"{error.text} {error.hint}"


def test_a_code_needs_its_mode():
    assert parse({"mode": "return", "code": "6"}).result == parse({"code": "6", "mode": "return"}).result == "ncclRemoteError"
    assert "mode=return" in refusal({"code": "6"}).hint


def test_delays():
    assert parse(pattern="delay").milliseconds == 100
    assert "needs a jitter" in refusal({"distribution": "normal"}, pattern="delay").text
    assert "no jitter" in refusal({"jitter": "5"}, pattern="delay").text
    assert parse({"jitter": "5", "distribution": "uniform"}, pattern="delay").jitter == 5


@pytest.mark.parametrize("text", ["0", "1%", "100%", "100", "150%", "-5", "x"])
def test_percent_of_speed(text):
    refusal({"percent": text}, pattern="slow")
    assert parse(pattern="slow").percent == 50
    assert parse({"percent": "2%"}, pattern="slow").percent == 2


@pytest.mark.parametrize(
    ("name", "version", "code"),
    [
        ("timeout", "2.32.3", 8),
        ("timeout", "2.30.0", 8),
        ("timeout", "2.21.5", 2),
        ("timeout", "", 2),
        ("ncclTimeout", "2.32.3", 8),
        ("ncclRemoteError", "2.18", 6),
    ],
)
def test_codes_by_version(name, version, code):
    library = Library(backend="nccl", path="", device=1, inode=1, version=version, sites=5)
    assert results.code(name, Rank(pid=1, start_time=1, libraries=(library,))) == code


def test_a_code_that_the_ranks_version_does_not_have():
    libraries_ = [Library(backend="nccl", path="", device=1, inode=1, version=version, sites=5) for version in ("2.21.5", "2.32.3")]
    for mapped in (libraries_[:1], libraries_):
        with pytest.raises(BadOption, match=r"2\.21\.5"):
            results.code("ncclTimeout", Rank(pid=1, start_time=1, libraries=tuple(mapped)))
