"""A host's processes for the tests: short to write down, with the values that /proc would have."""

from singularityd.model import Library
from singularityd.ranks.registry import ProcessFacts


def torchrun(rank, world=4, port=29500, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "a",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        **more,
    }


def facts(pid, environ=None, *, parent=1, start=None, name="python", inside=None):
    return ProcessFacts(
        pid=pid,
        start_time=pid if start is None else start,
        parent=parent,
        uid=1000,
        name=name,
        namespace_pids=(pid,) if inside is None else (pid, inside),
        environ=environ or {},
    )


def library(backend="gloo", sites=30):
    return Library(backend=backend, path=f"/lib/{backend}.so", device=1, inode=hash(backend) % 1000, version="", sites=sites)


def shown(registry):
    return [(rank.pid, rank.job, rank.rank) for rank in registry.all()]


def numbers(registry):
    return [(rank.pid, rank.rank) for rank in registry.all()]
