"""Which process of a run this is: host lists, launchers' variables, partial and contradictory ones."""

from __future__ import annotations

import pytest

from jaxtrain.config import ConfigError, default_config
from jaxtrain.runtime import cluster

SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[1-2]-rack3", "SLURM_PROCID": "3"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}


def find(environment, **changes):
    settings = default_config().runtime
    settings.update(changes)
    return cluster.find_processes(settings, environment)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[1-2]-rack3", "gpu1-rack3"),
        ("node[7],host2", "node7"),
        ("n[1,3]x[2-4]", "n1x2"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA"),
        ("a[001-003],b", "a001"),
        ("single", "single"),
        ("r[1-2]n[0,5-6]-ib[3],x", "r1n0-ib3"),
        ("login-1.cluster.org", "login-1.cluster.org"),
    ],
)
def test_first_host_of_a_slurm_list(hosts, first):
    assert cluster.first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",a", "a[1", "a]1", "a[1[2]]"])
def test_what_is_no_list_is_refused(hosts):
    with pytest.raises(ValueError):
        cluster.first_host(hosts)


def test_srun():
    found = find(SLURM)
    host, _, port = found.coordinator.rpartition(":")
    assert (host, found.count, found.index) == ("gpu1-rack3", 4, 3)
    assert cluster.PORTS[0] <= int(port) < cluster.PORTS[1]
    assert find(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != found.coordinator  # two steps of one job
    assert find(SLURM | {"JAX_COORDINATOR_PORT": "9999"}).coordinator == "gpu1-rack3:9999"
    assert find(SLURM, coordinator_address="other:1").coordinator == "other:1"
    assert find(SLURM | {"JAX_COORDINATOR_ADDRESS": "other:1"}) == cluster.Processes("other:1", 4, 3)
    without = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NUM_TASKS"}
    assert find(without).count == 8
    assert find(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == cluster.Processes("", 1, 0)
    assert find(SLURM, num_processes=1) == cluster.Processes("", 1, 0)


def test_in_a_job_but_not_in_a_step_a_process_is_alone():
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert find(batch) == cluster.Processes("", 1, 0)
    assert "SLURM_NTASKS=4" in cluster.not_a_task(batch) and "srun" in cluster.not_a_task(batch)
    assert cluster.not_a_task({"SLURM_JOB_ID": "77"}) == cluster.not_a_task(SLURM) == cluster.not_a_task({}) == ""


TORCH = {"MASTER_ADDR": "head", "MASTER_PORT": "1234", "WORLD_SIZE": "2", "RANK": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
MPI |= {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "job-0.svc:8476"}


def test_other_launchers():
    assert find(TORCH) == cluster.Processes("head:1234", 2, 1)
    assert find(TORCH | {"TORCHELASTIC_RUN_ID": "x"}).coordinator == "head:1235"  # torchrun's own store is at MASTER_PORT
    assert find(TORCH | SLURM) == cluster.Processes("head:1234", 2, 1)  # started by torchrun, which srun started
    found = find(MPI | SLURM)
    assert (found.coordinator.split(":")[0], found.count, found.index) == ("10.96.0.1", 2, 1)
    assert find(KUBERNETES) == cluster.Processes("job-0.svc:8476", 2, 1)
    assert find({"WORLD_SIZE": "1", "RANK": "0", "HOME": "/"}) == cluster.Processes("", 1, 0)
    assert find({"JOB_COMPLETION_INDEX": "1"}) == cluster.Processes("", 1, 0)  # one of several jobs that are no run together


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**SLURM, "SLURM_PROCID": ""}, "SLURM_PROCID of srun"),
        ({**SLURM, "SLURM_PROCID": "4"}, "runtime.process_id=4: must be less than runtime.num_processes=4"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x': expected a whole number"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[1"}, "SLURM_STEP_NODELIST='a[1'"),
        ({**TORCH, "RANK": ""}, "RANK of torchrun"),
        ({**TORCH, "MASTER_PORT": "99999"}, "runtime.coordinator_address=head:99999"),
        ({**MPI, "OMPI_MCA_orte_hnp_uri": ""}, "runtime.coordinator_address: missing"),
        ({**KUBERNETES, "JAX_COORDINATOR_ADDRESS": ""}, "runtime.coordinator_address: missing"),
        ({**TORCH, "WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1"),
    ],
)
def test_partial_and_contradictory_variables_are_named(environment, words):
    with pytest.raises(ConfigError) as caught:
        find(environment)
    assert len(caught.value.problems) == 1 and words in caught.value.problems[0]
