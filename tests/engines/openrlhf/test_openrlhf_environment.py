"""Which environment variables reach Ray's workers, and what is listed about the others."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from ray_node import running_ray

from exgrpo_orlhf.engines.openrlhf.worker_environment import (
    JOB_CONFIG,
    for_cpu_adam,
    forwarded,
    not_forwarded,
    without_job_env,
)


def node(**resources: float) -> dict:
    return {"Alive": True, "Resources": resources}


NODE = node(CPU=96.0, GPU=8.0)


def job(**variables: str) -> dict[str, str]:
    """What Ray 2.55 sets in the driver of a submitted job. variables: the job's own runtime environment"""
    return {
        JOB_CONFIG: json.dumps({"runtime_env": {"env_vars": variables}, "metadata": {}}),
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_worker_niceness": "0",
        **variables,
    }


@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_IB_TIMEOUT", "GLOO_TIMEOUT_SECONDS", "DS_SKIP_CUDA_CHECK", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING"),
        *("VLLM_USE_V2_MODEL_RUNNER", "TORCH_NCCL_ENABLE_MONITORING", "PYTORCH_CUDA_ALLOC_CONF", "FI_PROVIDER"),
        *("TOKENIZERS_PARALLELISM", "MLFLOW_TRACKING_URI", "WANDB_API_KEY", "EXGRPO_TEST_RUN", "HF_HOME"),
        *("COMET_API_KEY", "SWANLAB_API_KEY", "TRACKIO_SPACE_ID"),
    ],
)
def test_variables_of_the_stack_are_passed_on_with_their_values(name):
    assert forwarded({name: "some value"})[name] == "some value"
    assert not_forwarded({name: "some value"}) == []


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "VLLM_HOST_IP"),
        *("CUDA_HOME", "LD_LIBRARY_PATH", "RAY_memory_usage_threshold", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
    ],
)
def test_variables_of_one_machine_are_not_passed_on_and_are_named(name):
    assert name not in forwarded({name: "x"})
    assert not_forwarded({name: "x", "NCCL_DEBUG": "INFO"}) == [name]


def test_other_variables_of_a_shell_are_neither_passed_on_nor_listed():
    shell = dict.fromkeys(("HOME", "PATH", "TERM", "RANK", "RAY_ADDRESS", "OMPI_COMM_RANK"), "x")
    assert not forwarded(shell).keys() & shell.keys()
    assert not_forwarded(shell) == []


def test_defaults_hold_where_nothing_is_set_and_give_way_where_something_is():
    assert forwarded({})["NCCL_DEBUG"] == "WARN"
    assert forwarded({"NCCL_DEBUG": "INFO"})["NCCL_DEBUG"] == "INFO"
    assert forwarded({"TQDM_DISABLE": "0"})["TQDM_DISABLE"] == "0"


def test_what_ray_sets_in_a_jobs_driver_does_not_count_as_set_by_the_user():
    """One thread for the driver must not become one thread for Adam on the CPU."""
    assert "OMP_NUM_THREADS" not in forwarded(job())
    assert not_forwarded(job()) == []
    assert forwarded({**job(), "OMP_NUM_THREADS": "12"})["OMP_NUM_THREADS"] == "12"
    assert forwarded({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"


def test_variables_of_a_jobs_runtime_environment_are_not_listed_as_kept_back():
    assert not_forwarded({**job(), "NCCL_SOCKET_IFNAME": "eth0"}) != []
    assert not_forwarded(job(NCCL_SOCKET_IFNAME="eth0")) == []


@pytest.mark.parametrize(
    ("environ", "nodes", "threads"),
    [
        ({}, [NODE], "12"),
        (job(), [NODE], "12"),
        ({}, [NODE, node(CPU=24.0, GPU=4.0), node(CPU=2.0), {"Alive": False, "Resources": {}}], "6"),
        ({"OMP_NUM_THREADS": "4"}, [NODE], None),
        (job(OMP_NUM_THREADS="1"), [NODE], None),
        ({}, [node(CPU=8.0, GPU=8.0)], None),  # Ray's own 1
    ],
)
def test_adam_on_the_cpu_gets_a_gpus_share_of_the_scarcest_nodes_cpus_unless_a_number_is_set(environ, nodes, threads):
    assert for_cpu_adam(environ, nodes) == ({} if threads is None else {"OMP_NUM_THREADS": threads})


def test_variables_of_a_submitted_job_are_not_passed_on_again():
    variables = {"HF_TOKEN": "secret", "NCCL_DEBUG": "WARN"}
    assert without_job_env(variables, job(HF_TOKEN="secret")) == {"NCCL_DEBUG": "WARN"}
    for none in ("{}", '{"runtime_env": {}}', '{"runtime_env": null}'):
        assert without_job_env(variables, {JOB_CONFIG: none}) == without_job_env(variables, {}) == variables


# -- Ray itself -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """The address of a Ray that has none of this process's OMP_ and NCCL_ variables."""
    pytest.importorskip("ray", reason="Ray is not installed")
    with running_ray(tmp_path, cpus=6, gpus=2) as address:
        yield address


def in_the_workers(address: str) -> dict:
    """The environment of actors that are made as OpenRLHF makes policy actors. Call it in a separate process."""
    os.environ.update(NCCL_IB_TIMEOUT="23", OMP_NUM_THREADS="5", NCCL_SOCKET_IFNAME="eth9")
    import openrlhf_on_cpu  # noqa: F401
    import ray

    from exgrpo_orlhf.engines.openrlhf import driver
    from exgrpo_orlhf.settings import OpenRLHF

    class Actor:
        def environment(self) -> dict[str, str]:
            return {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "OMP_"))}

    with driver.connected(OpenRLHF(ray_address=address), 0):
        chosen = for_cpu_adam({}, ray.nodes())
        plain = ray.remote(num_cpus=0.2)(Actor).remote()
        with_adam = ray.remote(num_gpus=1, runtime_env={"env_vars": chosen})(Actor).options(num_cpus=0.2).remote()
        return {
            "chosen": chosen,
            "plain": ray.get(plain.environment.remote(), timeout=600),
            "with_adam": ray.get(with_adam.environment.remote(), timeout=600),
        }


@pytest.mark.openrlhf
@pytest.mark.slow
def test_a_variable_of_the_driver_arrives_in_the_workers_of_a_cluster_that_was_started_without_it(cluster):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        environments = pool.submit(in_the_workers, cluster).result(timeout=900)
    assert environments["plain"] == {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "23", "OMP_NUM_THREADS": "5"}
    assert environments["chosen"] == {"OMP_NUM_THREADS": "3"}
    assert environments["with_adam"] == {**environments["plain"], "OMP_NUM_THREADS": "3"}
