"""What stands between a driver and its Ray: an address where no cluster is, a folder with too long a name, too few GPUs
or CPUs. Each ends the start with a sentence that names it."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import psutil
import pytest
import ray
from http_server import http_server
from ray_node import running_ray
from run_builders import environment, free_port, wait_until

from exgrpo_orlhf.engines.openrlhf import driver
from exgrpo_orlhf.io.stopping import StopRequest
from exgrpo_orlhf.sampling import EngineLost
from exgrpo_orlhf.settings import OpenRLHF

pytestmark = pytest.mark.openrlhf


@pytest.fixture
def dashboard():
    """host:port of an HTTP server, as Ray's dashboard is one."""
    with http_server(lambda *_: (200, {}, "")) as address:
        yield address.removeprefix("http://")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:8265", "that is an address for ray job submit"),
        ("ray://127.0.0.1:10001", "or for Ray's client"),
        ("127.0.0.1:dead", "Connection refused"),
        ("127.0.0.1:dashboard", "what answers there is no head node of Ray"),
        ("10.1.2.3", "invalid literal"),
    ],
)
@pytest.mark.parametrize("bound", [True, None, "auto"])
def test_an_address_without_a_cluster_is_refused_at_once_and_named_as_it_was_given(
    address, reason, bound, dashboard, monkeypatch
):
    address = address.replace("127.0.0.1:dashboard", dashboard).replace("dead", str(free_port()))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if bound is not True:
        monkeypatch.setenv("RAY_ADDRESS", address)
    by = "OpenRLHF.ray_address" if bound is True else "RAY_ADDRESS"
    with (
        pytest.raises(EngineLost, match=rf"^no Ray cluster can be reached at {by} = '{address}': .*{reason}"),
        driver.connected(OpenRLHF(ray_address=address if bound is True else bound), 0),
    ):
        pass
    assert not ray.is_initialized()


@pytest.mark.parametrize("names", [("TMPDIR",), ("RAY_TMPDIR", "TMPDIR")])
def test_a_folder_whose_path_is_too_long_for_rays_sockets_is_named(names, tmp_path, monkeypatch):
    folder = tmp_path / ("a-folder-of-a-job" * 3)
    folder.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in names:
        monkeypatch.setenv(name, str(folder))
    with (
        pytest.raises(EngineLost, match=rf"^{names[0]} = '{folder}' is too long a path .* such as /tmp$"),
        driver.connected(OpenRLHF(), 0),
    ):
        pass
    assert not ray.is_initialized()


NODE = {"GPU": 8.0, "CPU": 16.0}


@pytest.mark.parametrize(
    ("nodes", "wrong"),
    [
        ([NODE], None),
        ([{"GPU": 4.0, "CPU": 4.0}, {"CPU": 64.0}, {"GPU": 4.0, "CPU": 5.0}], None),
        ([{"GPU": 7.0, "CPU": 16.0}], "Ray has 7 GPUs free, 7 of them with a CPU"),
        ([{"GPU": 8.0, "CPU": 7.0}], "Ray has 8 GPUs free, 7 of them"),
        ([{"GPU": 8.0, "CPU": 2.0}, {"CPU": 64.0}], "Ray has 8 GPUs free, 2 of them"),  # of another node
        ([{"GPU": 8.0}], "Ray has 8 GPUs free, 0 of them"),
        ([], "Ray has 0 GPUs free"),
    ],
)
def test_a_start_waits_for_gpus_with_a_cpu_of_their_node_each_and_says_what_is_lacking(nodes, wrong, monkeypatch):
    by_id = {str(i): node for i, node in enumerate(nodes)}
    monkeypatch.setattr(driver.ray_state, "available_resources_per_node", lambda: by_id)
    with StopRequest() as stop:
        if wrong is None:
            driver._await_gpus(8, 0.0, stop)
            return
        with pytest.raises(EngineLost, match=rf"^the layout needs 8 GPUs .*{wrong}"):
            driver._await_gpus(8, 0.0, stop)


def actors_start(address: str, gpus: int) -> bool:
    """In a process of its own: what is waited for suffices for a placement as OpenRLHF asks for it."""
    with StopRequest() as stop, driver.connected(OpenRLHF(ray_address=address, cpu_bench=True), 0):
        driver._await_gpus(gpus, 0.0, stop)
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="PACK")
        return group.wait(120)


@pytest.mark.slow
@pytest.mark.parametrize("cpus", [1, 2])
def test_a_real_cluster_needs_as_many_cpus_as_gpus(cpus, tmp_path):
    with (
        running_ray(tmp_path, cpus=cpus, gpus=2) as address,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        started = pool.submit(actors_start, address, 2)
        if cpus == 2:
            assert started.result(timeout=900)
        else:
            with pytest.raises(EngineLost, match=r"2 GPUs free, 1 of them with a CPU; .* and --num-cpus say"):
                started.result(timeout=900)


WAITS = """
import openrlhf_on_cpu, ray, subprocess, sys, time
from pathlib import Path
from exgrpo_orlhf.engines.openrlhf import driver
from exgrpo_orlhf.settings import OpenRLHF
from exgrpo_orlhf.io.stopping import StopRequest
from exgrpo_orlhf.io.terminal import messages

class Actor:  # which has a process of its own, as an engine of vLLM has
    def work(self, path):
        child = subprocess.Popen(["sleep", "600"])
        Path(path).write_text(str(child.pid))
        time.sleep(600)

messages()
driver._PATIENCE, run = 3.0, Path(sys.argv[1])
with StopRequest() as stop, driver.connected(OpenRLHF(cpu_bench=True), 0), driver._Watch(stop, run, 600.0, None):
    ray.get(ray.remote(Actor).remote().work.remote(str(run / "child")))
"""


@pytest.mark.slow
def test_a_run_whose_head_node_dies_says_so_and_leaves_nothing_behind(tmp_path):
    own = environment(RAY_ADDRESS="")
    program = subprocess.Popen([sys.executable, "-c", WAITS, tmp_path], stderr=subprocess.PIPE, text=True, env=own)
    child = tmp_path / "child"
    wait_until(lambda: child.exists() and child.read_text(), 600, program)
    started = psutil.Process(program.pid).children(recursive=True)
    assert int(child.read_text()) in [one.pid for one in started]
    [head] = [one for one in started if one.name() == "gcs_server"]
    head.kill()
    _, messages = program.communicate(timeout=600)
    assert program.returncode == 1
    assert "error: Ray's head node" in messages
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left
