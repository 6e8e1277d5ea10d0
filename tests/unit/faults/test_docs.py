import re
from pathlib import Path

from singularityd.faults import points
from singularityd.faults.patterns import PATTERNS

PAGE = (Path(__file__).parents[3] / "docs/faults.md").read_text()
WORDS = " ".join(PAGE.split())


def test_the_page_tells_of_every_pattern_what_the_pattern_says():
    for pattern in PATTERNS:
        assert f"### {pattern.name}\n" in PAGE
        assert f"{pattern.summary}." in WORDS
        assert f"{pattern.effect}." in WORDS
        rows = [f"| `{option.name}` | {option.values} | {option.help} |" for option in pattern.options]
        assert "\n".join(rows) in PAGE
        assert f"Done to calls of {', '.join(pattern.backends)}. Mechanism: {', '.join(pattern.mechanisms)}." in PAGE


def test_the_page_lists_the_points_of_each_library():
    for backend in ("nccl", "gloo"):
        assert f"* {backend}: {', '.join(points.operations(backend))}" in WORDS


def test_every_ending_that_the_service_gives_is_explained():
    source = (Path(__file__).parents[3] / "daemon/singularityd/faults/service.py").read_text()
    endings = set(re.findall(r'"((?:daemon|executor|journal|caller|cleared)[a-z ]*)"', source))
    assert {"daemon stopped", "executor silent", "cleared"} <= endings
    for ending in endings - {"journal"}:
        assert f"| `{ending}` |" in PAGE, ending
