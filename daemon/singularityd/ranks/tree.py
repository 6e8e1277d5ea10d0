"""Which of the processes that carry the same identity is the rank.

A bash wrapper, the launcher, `python train.py` and its data-loader workers can all have RANK=3 in their environment. Pure functions
over what is known now: the order in which it became known does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from .environment import UNKNOWN_JOB

Key = tuple[int, int]
"""(pid, start_time): names one process for ever."""

LAUNCHERS = frozenset({
    "torchrun", "pt_elastic", "accelerate", "deepspeed", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr",
    "orterun", "orted", "prterun", "prte", "prted", "srun", "slurmstepd", "bash", "sh", "dash", "zsh",
})  # fmt: skip
"""Names (cut to 15 bytes, as the kernel does) of processes that start ranks; a pod's RANK is in the launcher's environment too."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What choosing needs to know of one process."""

    key: Key
    parent: int
    name: str
    job: str
    rank: int | None
    depth: int
    calls: bool
    """Seen making collective calls, or joining a communicator."""
    library: bool
    exited: bool


def chosen(candidates: Sequence[Candidate]) -> set[Key]:
    """The keys of those that are ranks, exited ones that nobody replaced included."""
    parents = _parents(candidates)
    by_key = {candidate.key: candidate for candidate in candidates}
    launchers = _launchers(candidates, by_key, parents)
    groups: dict[tuple[str, int], list[Candidate]] = {}
    keys: set[Key] = set()
    for candidate in candidates:
        if candidate.rank is None:
            if candidate.calls:  # it takes part in collectives, whoever it is: shown with its rank unknown
                keys.add(candidate.key)
        elif candidate.calls or candidate.key not in launchers:
            groups.setdefault((candidate.job, candidate.rank), []).append(candidate)
    for (job, _), members in groups.items():
        keys.update(member.key for member in _ranks_of(members, parents, alone=job != UNKNOWN_JOB))
    return keys


def _ranks_of(members: list[Candidate], parents: Mapping[Key, Key], *, alone: bool) -> list[Candidate]:
    """The rank among those of one (job, rank); more than one only where nothing tells them apart.

    `alone`: the job has a name, so at most one of the unrelated families can be its rank.
    """
    heads = [head for family in _families(members, parents) for head in _heads(family, parents)]
    if any(not head.exited for head in heads):
        heads = [head for head in heads if not head.exited]  # a restarted rank replaces the one that exited
    if alone and any(head.calls for head in heads):
        heads = [head for head in heads if head.calls]
    return heads


def _heads(family: list[Candidate], parents: Mapping[Key, Key]) -> list[Candidate]:
    """Those with the best evidence, and of these the ones that descend from no other."""
    best = max(_evidence(member) for member in family)
    members = [member for member in family if _evidence(member) == best]
    keys = {member.key for member in members}
    return [member for member in members if not any(key in keys for key in _ancestors(member.key, parents))]


def _evidence(candidate: Candidate) -> int:
    if candidate.calls:
        return 2
    return int(candidate.library)


def _families(members: list[Candidate], parents: Mapping[Key, Key]) -> list[list[Candidate]]:
    """Members that share an ancestor among the members, together."""
    keys = {member.key for member in members}
    families: dict[Key, list[Candidate]] = {}
    for member in members:
        line = [member.key, *(key for key in _ancestors(member.key, parents) if key in keys)]
        families.setdefault(line[-1], []).append(member)
    return list(families.values())


def _launchers(candidates: Iterable[Candidate], by_key: Mapping[Key, Candidate], parents: Mapping[Key, Key]) -> set[Key]:
    """Those named like one, and those with a descendant that an inner launcher started: srun's task 0 may be torchrun, not its rank 0."""
    found: set[Key] = set()
    for candidate in candidates:
        if candidate.name in LAUNCHERS:
            found.add(candidate.key)
        if candidate.rank is not None:
            found.update(key for key in _ancestors(candidate.key, parents) if by_key[key].depth < candidate.depth)
    return found


def _parents(candidates: Sequence[Candidate]) -> dict[Key, Key]:
    """Each process's parent among the candidates: the holder of that pid that started last before the child."""
    holders: dict[int, list[Key]] = {}
    for candidate in candidates:
        holders.setdefault(candidate.key[0], []).append(candidate.key)
    parents: dict[Key, Key] = {}
    for candidate in candidates:
        older = [key for key in holders.get(candidate.parent, ()) if key != candidate.key and key[1] <= candidate.key[1]]
        if older:
            parents[candidate.key] = max(older, key=lambda key: key[1])
    return parents


def _ancestors(key: Key, parents: Mapping[Key, Key]) -> Collection[Key]:
    """From the parent upwards; stops where wrong facts would make a ring."""
    line: list[Key] = []
    while (above := parents.get(key)) is not None and above not in line:
        line.append(above)
        key = above
    return line
