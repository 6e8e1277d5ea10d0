"""A daemon that answers from memory, and how to ask it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from singularityd.api.v1 import node_pb2
from singularityd.ctl.main import cli
from singularityd.ctl.session import Session

from . import samples

GOLDEN = Path(__file__).parents[2] / "data" / "ctl"


class FakeClient:
    """Answers with `samples`; `answers` replaces one by a message or by an exception. `asked` keeps what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.closed = False

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def _answer(self, name: str, default: Any, **asked: Any) -> Any:
        self.asked.append((name, asked))
        answer = self.answers.get(name, default)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def status(self) -> node_pb2.StatusReply:
        return self._answer("status", samples.STATUS)

    def version(self) -> node_pb2.VersionReply:
        return self._answer("version", samples.VERSION)

    def ranks(self, job: str = "") -> node_pb2.ListRanksReply:
        return self._answer("ranks", samples.RANKS, job=job)

    def top(self, job: str = "") -> node_pb2.TopReply:
        return self._answer("top", samples.TOP_AFTER if any(name == "top" for name, _ in self.asked) else samples.TOP_BEFORE, job=job)

    def inject(self, **asked: Any) -> node_pb2.Fault:
        default = samples.ARMED if not asked["dry_run"] else samples.DRY
        return self._answer("inject", default, **asked)

    def inject_many(self, **asked: Any) -> node_pb2.ListFaultsReply:
        return self._answer("inject_many", node_pb2.ListFaultsReply(faults=[samples.ARMED, samples.ARMED]), **asked)

    def clear(self, fault: str) -> node_pb2.ListFaultsReply:
        return self._answer("clear", node_pb2.ListFaultsReply(faults=[samples.ENDED]), id=fault)

    def faults(self, history: bool = False, limit: int = 100) -> node_pb2.ListFaultsReply:
        return self._answer("faults", samples.FAULTS, history=history, limit=limit)

    def wait(self, fault: str, timeout: float) -> node_pb2.Fault:
        return self._answer("wait", samples.ENDED, id=fault, timeout=timeout)

    def patterns(self) -> node_pb2.ListPatternsReply:
        return self._answer("patterns", samples.PATTERNS)

    def start_campaign(self, toml: str, *, dry_run: bool = False) -> node_pb2.Campaign:
        return self._answer("start_campaign", samples.CAMPAIGN_DRY if dry_run else samples.CAMPAIGN, toml=toml, dry_run=dry_run)

    def stop_campaign(self, campaign: str) -> node_pb2.Campaign:
        return self._answer("stop_campaign", samples.CAMPAIGN_ENDED, id=campaign)

    def campaign(self, campaign: str, *, report: bool = False) -> node_pb2.Campaign:
        return self._answer("campaign", samples.CAMPAIGN_ENDED, id=campaign, report=report)

    def campaigns(self, limit: int = 100) -> node_pb2.ListCampaignsReply:
        return self._answer("campaigns", node_pb2.ListCampaignsReply(campaigns=[samples.CAMPAIGN_ENDED]), limit=limit)

    def record_campaign(self, *, campaign: str = "", since: float = 0.0) -> node_pb2.RecordCampaignReply:
        return self._answer("record_campaign", node_pb2.RecordCampaignReply(toml='name = "again"\n'), campaign=campaign, since=since)

    def doctor(self) -> node_pb2.CheckReply:
        return self._answer("doctor", samples.CHECK)

    def follow(self, **asked: Any) -> Iterator[node_pb2.Event]:
        self.asked.append(("follow", asked))
        for event in self.answers.get("follow", samples.EVENTS):
            if isinstance(event, BaseException):
                raise event
            yield event


def ask(*words: str, client: FakeClient | None = None, env: dict[str, str] | None = None, **session: Any) -> Result:
    """Run singularityctl with these words against a fake daemon."""
    fake = client or FakeClient()

    def connect(socket: str, timeout: float) -> Any:
        fake.asked.append(("connect", {"socket": socket, "timeout": timeout}))
        return fake

    pauses: list[float] = []
    made = Session(client=connect, clock=lambda: samples.NOW, sleep=pauses.append)
    for name, value in session.items():
        setattr(made, name, value)
    return CliRunner().invoke(cli, list(words), obj=made, env=env)


def check_golden(name: str, text: str) -> None:
    """Compare with tests/data/ctl/NAME.golden; UPDATE_GOLDEN=1 writes it."""
    path = GOLDEN / f"{name}.golden"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text(), f"{path.name} differs; if that is meant, say so in CHANGELOG.md and run with UPDATE_GOLDEN=1"
