"""What launchers write into the environment, as their ranks really carry it."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel.procfs import IDENTITY
from singularityd.ranks.environment import VARIABLES, identify

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
MPIRUN4 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "1867513857",
    "PMIX_RANK": "2",
}
MPIRUN5 = MPIRUN4 | {"PMIX_NAMESPACE": "prterun-node-a-7231@1"}

# name -> (environment, job, rank, world, local rank, scheme)
REAL = {
    "torchrun, all defaults": (TORCHRUN, "tcp-node-a:29500", 3, 8, 3, "torchrun"),
    "torchrun --standalone": (TORCHRUN | {"TORCHELASTIC_RUN_ID": "6f1c-9a"}, "torchrun-6f1c-9a", 3, 8, 3, "torchrun"),
    "torchrun --rdzv-id static": (TORCHRUN | {"TORCHELASTIC_RUN_ID": "static"}, "tcp-node-a:29500", 3, 8, 3, "torchrun"),
    "torchrun over IPv6": (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, "tcp-[fd00::1]:29500", 3, 8, 3, "torchrun"),
    "env:// by hand": ({"RANK": "0", "WORLD_SIZE": "2"}, "unknown", 0, 2, None, "torchrun"),
    "srun": (SRUN, "slurm-1234.0", 5, 8, 1, "slurm"),
    "srun of a job array": (SRUN | {"SLURM_ARRAY_JOB_ID": "1230", "SLURM_ARRAY_TASK_ID": "4"}, "slurm-1230_4.0", 5, 8, 1, "slurm"),
    "srun torchrun": (SRUN | TORCHRUN, "slurm-1234.0", 3, 8, 3, "torchrun"),
    "srun --mpi=pmix": (SRUN | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.1234.0"}, "slurm-1234.0", 5, 8, 1, "openmpi"),
    "srun --mpi=pmi2": (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "1234.0"}, "slurm-1234.0", 5, 8, 1, "pmi"),
    "the batch script": (SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}, "slurm-1234", None, None, None, ""),
    "mpirun, Open MPI 4": (MPIRUN4, "pmix-1867513857", 2, 4, 0, "openmpi"),
    "mpirun, Open MPI 5": (MPIRUN5, "pmix-prterun-node-a-7231@1", 2, 4, 0, "openmpi"),
    "mpirun in sbatch, first host": (MPIRUN5 | SRUN | {"SLURM_STEP_ID": "4294967291"}, "slurm-1234", 2, 4, 0, "openmpi"),
    "mpirun in sbatch, other host": (MPIRUN5 | SRUN, "slurm-1234", 2, 4, 0, "openmpi"),
    "mpiexec, MPICH": ({"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1"}, "unknown", 1, 4, 1, "pmi"),
    "mpiexec with a job id": ({"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_JOBID": "kvs_77"}, "pmi-kvs_77", 1, 4, None, "pmi"),
    "jax": (
        {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "node-a:8476"},
        "jax-node-a:8476",
        1,
        2,
        None,
        "jax",
    ),
    "nothing": ({"HOME": "/root"}, "unknown", None, None, None, ""),
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_environment(name):
    environ, *expected = REAL[name]
    found = identify(environ)
    assert [found.job, found.rank, found.world, found.local_rank, found.scheme] == expected
    assert found.problems == ()


def test_ranks_of_one_job_on_two_hosts_have_one_job_id():
    there = TORCHRUN | {"RANK": "7", "LOCAL_RANK": "0", "GROUP_RANK": "1"}
    assert identify(there).job == identify(TORCHRUN).job


def test_two_plain_torchruns_of_one_host_are_two_jobs():
    assert identify(TORCHRUN).job != identify(TORCHRUN | {"MASTER_PORT": "29501"}).job


BAD = [
    ({"RANK": "abc"}, "RANK='abc'"),
    ({"RANK": "-1"}, "RANK='-1'"),
    ({"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
    ({"RANK": "1_0", "WORLD_SIZE": "64"}, "RANK='1_0'"),
    ({"RANK": "٣"}, "RANK="),
    ({"RANK": "9" * 5000}, "RANK="),
]


@pytest.mark.parametrize(("wrong", "reason"), BAD)
def test_a_value_that_cannot_be_is_unknown_and_says_why(wrong, reason):
    found = identify(TORCHRUN | wrong)
    assert found.rank is None
    assert any(reason in problem for problem in found.problems)
    assert all(len(problem) < 100 for problem in found.problems)


def test_an_outer_launcher_does_not_overrule_an_unreadable_inner_one():
    assert identify(SRUN | TORCHRUN | {"RANK": "abc"}).rank is None


def test_a_bad_world_leaves_the_rank():
    found = identify(TORCHRUN | {"WORLD_SIZE": "many"})
    assert (found.rank, found.world) == (3, None)


def test_the_executor_hands_over_what_is_read_here():
    optional = {"SLURM_STEP_NUM_TASKS", "MPI_LOCALRANKID"}  # refinements: their absence loses nothing but a local rank
    assert VARIABLES - optional <= IDENTITY


values = st.one_of(st.integers(-2, 40).map(str), st.text(string.printable, max_size=12), st.sampled_from(["none", "static", ""]))


@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), values))
def test_no_environment_breaks_it_or_makes_up_a_rank(environ):
    found = identify(environ)
    if found.rank is not None:
        assert 0 <= found.rank < (found.world or 10**10)
        assert str(found.rank) in {value.strip().lstrip("0") or "0" for value in environ.values()}
    assert found.job


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_torchrun_round_trip(rank, more):
    found = identify({"RANK": str(rank), "WORLD_SIZE": str(rank + more)})
    assert (found.rank, found.world) == (rank, rank + more)
