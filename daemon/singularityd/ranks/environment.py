"""What a process's environment says about its rank: one small reader per launcher, in one explicit list.

The environment is what the launcher wrote at exec; it is evidence, not proof. A value that cannot be right becomes None with the
reason kept, never 0: a wrong rank number is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

UNKNOWN_JOB = "unknown"

# Slurm numbers its pseudo steps (batch script, extern, interactive shell) downwards from 2**32 - 1; real steps count from 0.
_FIRST_PSEUDO_STEP = 0xFFFF_FF00
# torchrun's default (and what `--rdzv-backend static` leaves): the same for every job, so it names none.
_NO_RUN_ID = frozenset({"", "none", "static"})


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one launcher's variables say; `job` is empty where they do not name one."""

    scheme: str
    rank: int | None = None
    world: int | None = None
    local_rank: int | None = None
    job: str = ""
    problems: tuple[str, ...] = ()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole environment says."""

    job: str = UNKNOWN_JOB
    rank: int | None = None
    world: int | None = None
    local_rank: int | None = None
    scheme: str = ""
    depth: int = 0
    """How close to the rank the launcher is that wrote it: an inner launcher's children have a greater depth than the launcher."""
    problems: tuple[str, ...] = ()


def _torchrun(environ: Mapping[str, str]) -> Reading | None:
    """RANK and WORLD_SIZE: torchrun, and whatever else follows PyTorch's `env://`."""
    if "RANK" not in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return _reading("torchrun", environ, rank="RANK", world="WORLD_SIZE", local="LOCAL_RANK", job=_torchrun_job(environ))


def _torchrun_job(environ: Mapping[str, str]) -> str:
    """The run's id, or the address its ranks meet at: plain torchruns of one host are told apart by their port alone."""
    run = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if run.lower() not in _NO_RUN_ID:
        return f"torchrun-{run}"
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    if not address or not port:
        return ""
    return f"tcp-[{address}]:{port}" if ":" in address else f"tcp-{address}:{port}"


def _jax(environ: Mapping[str, str]) -> Reading | None:
    """The variables of `jax.distributed.initialize()`."""
    if "JAX_PROCESS_ID" not in environ:
        return None
    coordinator = environ.get("JAX_COORDINATOR_ADDRESS", "").strip()
    job = f"jax-{coordinator}" if coordinator else ""
    return _reading("jax", environ, rank="JAX_PROCESS_ID", world="JAX_NUM_PROCESSES", job=job)


def _openmpi(environ: Mapping[str, str]) -> Reading | None:
    """mpirun of Open MPI 4 (orted) and 5 (prted), and any other PMIx server."""
    namespace = environ.get("PMIX_NAMESPACE", "").strip()
    job = f"pmix-{namespace}" if namespace else ""
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _reading(
            "openmpi", environ, rank="OMPI_COMM_WORLD_RANK", world="OMPI_COMM_WORLD_SIZE", local="OMPI_COMM_WORLD_LOCAL_RANK", job=job
        )
    if "PMIX_RANK" in environ:  # PMIx alone tells no size: srun --mpi=pmix tells it in Slurm's own variables
        return _reading("openmpi", environ, rank="PMIX_RANK", job=job)
    return None


def _pmi(environ: Mapping[str, str]) -> Reading | None:
    """mpiexec of MPICH and Intel MPI (hydra), and srun --mpi=pmi2."""
    if "PMI_RANK" not in environ:
        return None
    job = environ.get("PMI_JOBID", "").strip()
    return _reading("pmi", environ, rank="PMI_RANK", world="PMI_SIZE", local="MPI_LOCALRANKID", job=f"pmi-{job}" if job else "")


def _slurm(environ: Mapping[str, str]) -> Reading | None:
    """srun's tasks; also read in processes that another launcher started inside an allocation, for the job's id."""
    if not _slurm_job(environ):
        return None
    # A batch script has SLURM_NTASKS of the allocation and is task 0 of a pseudo step: no rank, and neither are its children.
    if _pseudo_step(environ):
        return Reading(scheme="slurm", job=_slurm_job(environ))
    world = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return _reading("slurm", environ, rank="SLURM_PROCID", world=world, local="SLURM_LOCALID", job=_slurm_job(environ))


def _slurm_job(environ: Mapping[str, str]) -> str:
    """`slurm-JOB.STEP`, `slurm-ARRAY_TASK.STEP` as squeue shows it; no step where it would differ between the job's hosts."""
    job = environ.get("SLURM_JOB_ID", "").strip()
    if not job:
        return ""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", "").strip(), environ.get("SLURM_ARRAY_TASK_ID", "").strip()
    name = f"slurm-{array}_{task}" if array and task else f"slurm-{job}"
    step = environ.get("SLURM_STEP_ID", "").strip()
    # mpirun starts its daemons on the other hosts with srun (step 0) and its own host's ranks directly (the batch step).
    if not step or "OMPI_COMM_WORLD_RANK" in environ or _pseudo_step(environ):
        return name
    return f"{name}.{step}"


def _pseudo_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "").strip()
    return step in {"batch", "extern", "interactive"} or (_is_decimal(step) and int(step) >= _FIRST_PSEUDO_STEP)


READERS: tuple[Callable[[Mapping[str, str]], Reading | None], ...] = (_torchrun, _jax, _openmpi, _pmi, _slurm)
"""Innermost launcher first: the first that knows the rank tells it."""

JOB_ORDER = ("slurm", "torchrun", "openmpi", "pmi", "jax")
"""Whose name for the job is taken: the one that a person can look up first."""

_DEPTH = {"torchrun": 3, "jax": 3, "openmpi": 2, "pmi": 2, "slurm": 1}

VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "TORCHELASTIC_RUN_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMIX_NAMESPACE",
        "PMIX_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_JOBID",
        "MPI_LOCALRANKID",
        "JAX_PROCESS_ID",
        "JAX_NUM_PROCESSES",
        "JAX_COORDINATOR_ADDRESS",
    }
)
"""Everything the readers look at; the executor passes on these and no secrets."""


def identify(environ: Mapping[str, str]) -> Identity:
    """What `environ` says about a process's rank; never raises, and what it cannot read is None with a problem told."""
    readings = [reading for reader in READERS if (reading := reader(environ)) is not None]
    problems = tuple(problem for reading in readings for problem in reading.problems)
    jobs = {reading.scheme: reading.job for reading in readings if reading.job}
    job = next((jobs[scheme] for scheme in JOB_ORDER if scheme in jobs), UNKNOWN_JOB)
    ranked = next((reading for reading in readings if reading.rank is not None or reading.problems), None)
    # An inner launcher whose rank is unreadable is not overruled by an outer one: srun's task 0 is torchrun, not its rank 0.
    if ranked is None:
        return Identity(job=job, problems=problems)
    if ranked.rank is None:
        return Identity(job=job, scheme=ranked.scheme, depth=_depth(ranked, environ), problems=problems)
    world, local = ranked.world, ranked.local_rank
    if world is None:  # PMIx and some wrappers tell the rank alone; another launcher with the same rank counts the same world
        world = next((other.world for other in readings if other.rank == ranked.rank and other.world is not None), None)
    if local is None:
        local = next((other.local_rank for other in readings if other.rank == ranked.rank and other.local_rank is not None), None)
    return Identity(
        job=job,
        rank=ranked.rank,
        world=world,
        local_rank=local,
        scheme=ranked.scheme,
        depth=_depth(ranked, environ),
        problems=problems,
    )


def _depth(reading: Reading, environ: Mapping[str, str]) -> int:
    """Only torchrun's own children have its run id: an operator may set RANK on the pod, and so on torchrun itself."""
    return _DEPTH[reading.scheme] + (reading.scheme == "torchrun" and "TORCHELASTIC_RUN_ID" in environ)


def _reading(scheme: str, environ: Mapping[str, str], *, rank: str, world: str = "", local: str = "", job: str = "") -> Reading:
    """Read the three numbers by their variables' names, and drop what cannot be."""
    problems: list[str] = []
    size = _number(environ, world, problems)
    if size == 0:
        problems.append(f"{world}=0 is no size")
        size = None
    number = _number(environ, rank, problems)
    if number is not None and size is not None and number >= size:
        problems.append(f"{rank}={number} is not below {world}={size}")
        number = size = None
    place = _number(environ, local, problems)
    return Reading(scheme=scheme, rank=number, world=size, local_rank=place, job=job, problems=tuple(problems))


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    text = environ.get(name, "").strip() if name else ""
    if not text:
        return None
    if _is_decimal(text):
        return int(text)
    problems.append(f"{name}={text[:40]!r} is no number from 0")
    return None


def _is_decimal(text: str) -> bool:
    """ASCII digits, at most ten: ranks are 32 bits, and int() takes signs, underscores and other scripts' digits."""
    return text.isascii() and text.isdigit() and len(text) <= 10
