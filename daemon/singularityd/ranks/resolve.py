"""From what a person typed (`--rank 3`, perhaps `--job`) to one live process, or an error that says what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from singularityd.errors import AmbiguousJob, NoSuchJob, NoSuchRank
from singularityd.model import Rank

_LIVE = frozenset({"running", "stopped"})


def resolve(ranks: Mapping[str, tuple[Rank, ...]], number: int, job: str, ending: Callable[[Rank], str]) -> Rank:
    """The live process that is rank `number`; `job` may be the start of a name where that names one job.

    Raises NoSuchRank, NoSuchJob and AmbiguousJob with the lists to choose from. `ending` says why an exited rank exited.
    """
    numbered = _numbered(ranks)
    name = _job(numbered, job)
    of_job = numbered[name]
    found = [rank for rank in of_job if rank.rank == number]
    live = [rank for rank in found if rank.state in _LIVE]
    if len(live) == 1:
        return live[0]
    if live:
        pids = ", ".join(str(rank.pid) for rank in live)
        raise AmbiguousJob(
            f"several processes say they are rank {number} of job {name}: pids {pids}", hint="they may be of jobs with no name of their own"
        )
    running = compact(rank.rank for rank in of_job if rank.state in _LIVE)
    here = f"this host runs {running}" if running else "this host runs none of its ranks now"
    if found:
        why = ending(found[-1]) if found[-1].state == "exited" else "it is dying"
        raise NoSuchRank(f"rank {number} of job {name} exited{f' ({why})' if why else ''}: {here}")
    raise NoSuchRank(f"no rank {number} in job {name}: {here}", hint="singularityctl ranks lists them")


def _numbered(ranks: Mapping[str, tuple[Rank, ...]]) -> dict[str, list[Rank]]:
    """Job -> its ranks with a number. Raises NoSuchRank where there is none at all."""
    numbered = {name: [rank for rank in found if rank.rank is not None] for name, found in ranks.items()}
    numbered = {name: found for name, found in numbered.items() if found}
    if not numbered:
        raise NoSuchRank(
            "no ranks run on this host", hint="singularityctl ranks lists what was found; singularityctl doctor says what cannot be seen"
        )
    return numbered


def members(ranks: Mapping[str, tuple[Rank, ...]], job: str) -> tuple[Rank, ...]:
    """The live ranks of a job, or of the only one. Raises NoSuchRank, NoSuchJob and AmbiguousJob."""
    numbered = _numbered(ranks)
    return tuple(rank for rank in numbered[_job(numbered, job)] if rank.state in _LIVE)


def _job(ranks: Mapping[str, list[Rank]], asked: str) -> str:
    if asked in ranks:
        return asked
    if asked:
        names = [name for name in ranks if name.startswith(asked)]
        if not names:
            raise NoSuchJob(f"no job {asked} on this host: {_listed(ranks, ranks)}", hint="a job may be named by the start of its name")
        if len(names) > 1:
            raise AmbiguousJob(f"several jobs of this host start with {asked}: {_listed(ranks, names)}", hint="name one with --job")
        return names[0]
    live = [name for name, members in ranks.items() if any(rank.state in _LIVE for rank in members)]
    names = live or list(ranks)
    if len(names) > 1:
        raise AmbiguousJob(f"several jobs run on this host: {_listed(ranks, names)}", hint="name one with --job")
    return names[0]


def _listed(ranks: Mapping[str, list[Rank]], names: Iterable[str]) -> str:
    def one(name: str) -> str:
        live = compact(rank.rank for rank in ranks[name] if rank.state in _LIVE)
        return f"{name} ({live or 'exited'})"

    return ", ".join(one(name) for name in sorted(names))


def compact(numbers: Iterable[int | None]) -> str:
    """`ranks 0-3, 7`; `rank 5`; empty for none."""
    wanted = sorted({number for number in numbers if number is not None})
    runs: list[list[int]] = []
    for number in wanted:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(wanted) == 1 else 'ranks'} {text}" if text else ""
