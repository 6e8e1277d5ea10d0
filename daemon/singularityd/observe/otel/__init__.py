"""OTLP export. Nothing of OpenTelemetry is imported until an exporter is asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from singularityd.errors import ConfigError
from singularityd.observe.bus import Bus
from singularityd.observe.reading import Reading
from singularityd.observe.settings import OtelSettings

if TYPE_CHECKING:
    from singularityd.observe.otel.exporter import OtelExporter


def create(settings: OtelSettings, *, reading: Callable[[], Awaitable[Reading]], bus: Bus) -> OtelExporter | None:
    """An exporter to start, or None where the settings do not ask for one.

    Raises ConfigError when the extra is not installed, or when a file that the settings name cannot be used. Loop thread.
    """
    return _exporter()(settings, reading=reading, bus=bus) if settings.enabled else None


def preload() -> None:
    """Import what an exporter needs now: later this process may no longer be able to read it. Raises ConfigError without the extra."""
    _exporter()


def _exporter() -> type[OtelExporter]:
    try:
        from singularityd.observe.otel.exporter import OtelExporter
    except ImportError as error:
        raise ConfigError(
            f"otel.enabled is set, but OpenTelemetry is not installed ({error})",
            hint="pip install 'singularityd[otel]', or set otel.enabled = false",
        ) from None
    return OtelExporter
