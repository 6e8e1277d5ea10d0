"""The token itself: what it says and its seal. Pure but for the random key, which lives as long as the daemon.

Form: base64url(JSON) "." base64url(HMAC-SHA256). Times are of the daemon's monotonic clock, so that nobody's clock set back prolongs one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from singularityd.api.identity.roles import Socket
from singularityd.errors import Unauthenticated

LONGEST = 4096
"""Bytes of a token: what is longer was not made here."""
_AGAIN = "take a new one from token.sock; singularityctl does by itself"


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a token says."""

    uid: int
    gids: tuple[int, ...]
    pid: int
    start: int
    """Of the process, clock ticks after boot."""
    expires: float
    """Seconds of the daemon's clock."""
    socket: Socket
    """The one it opens."""
    id: str
    """Random, used once."""


class Seal:
    """Makes and checks tokens; one key for one life of the daemon. Loop thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._used: OrderedDict[str, float] = OrderedDict()

    def make(self, *, uid: int, gids: tuple[int, ...], pid: int, start: int, socket: Socket, life: float) -> str:
        """A token that opens one call on that socket within `life` seconds."""
        claims = Claims(uid=uid, gids=gids, pid=pid, start=start, expires=self._clock() + life, socket=socket, id=secrets.token_urlsafe(12))
        body = _encode(msgspec.json.encode(claims))
        return f"{body}.{_encode(self._mac(body))}"

    def read(self, token: str, socket: Socket) -> Claims:
        """What it says. Raises Unauthenticated for one that is forged, of an earlier start, expired, or meant for another socket."""
        body, _, mac = token.partition(".")
        try:
            genuine = len(token) <= LONGEST and hmac.compare_digest(_decode(mac), self._mac(body))
        except (ValueError, binascii.Error):
            genuine = False
        if not genuine:
            raise Unauthenticated("the token is not of this daemon: it is forged, or the daemon was started again since", hint=_AGAIN)
        claims = msgspec.json.decode(_decode(body), type=Claims)
        if self._clock() >= claims.expires:
            raise Unauthenticated("the token has expired", hint=_AGAIN)
        if claims.socket != socket:
            raise Unauthenticated(f"the token is for {claims.socket}.sock, not for {socket}.sock", hint=f"ask token.sock for `{socket}`")
        return claims

    def use(self, claims: Claims) -> None:
        """Spend it. Raises Unauthenticated when it was spent before: whoever heard a token can do nothing with it."""
        now = self._clock()
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        if claims.id in self._used:
            raise Unauthenticated("the token was used before: one token opens one call", hint=_AGAIN)
        self._used[claims.id] = claims.expires

    def _mac(self, body: str) -> bytes:
        return hmac.digest(self._key, body.encode(), hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
