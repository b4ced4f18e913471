"""A benchmark on a Ray cluster of two nodes: the files of the local engine, also when a node dies on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import tiny

from mergeway.bench import bench

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RULES = ["average", "opcm", "ode:guidance=0.3"]


def told(out):
    """Every file of a run but the timings."""
    return {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "timings.jsonl"}


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_two_nodes_give_what_one_process_gives(tmp_path, cluster):
    suite = tiny.vision_suite(tmp_path / "suite")
    local = bench(suite, RULES, orders=2, out=tmp_path / "local")
    clustered = bench(suite, RULES, orders=2, out=tmp_path / "ray", engine="ray")
    assert told(tmp_path / "local") == told(tmp_path / "ray")
    without = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]  # noqa: E731
    assert without(local.rows()) == without(clustered.rows())


def test_a_node_that_dies_loses_nothing(tmp_path, cluster):
    suite = tiny.vision_suite(tmp_path / "suite")
    bench(suite, RULES, orders=4, out=tmp_path / "local")
    killed: list[float] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while ray.available_resources().get("CPU", 0) >= 1 and time.monotonic() < until:
            time.sleep(0.02)  # until both nodes are at work
        cluster.remove_node(cluster.second, allow_graceful=False)
        killed.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    bench(suite, RULES, orders=4, out=tmp_path / "ray", engine="ray")
    ended = time.monotonic()
    killer.join()
    assert killed[0] < ended
    until = time.monotonic() + 60
    while len([n for n in ray.nodes() if n["Alive"]]) > 1 and time.monotonic() < until:
        time.sleep(0.5)
    assert len([n for n in ray.nodes() if n["Alive"]]) == 1
    assert told(tmp_path / "local") == told(tmp_path / "ray")


def working() -> list[int]:
    """The processes that fold a stream at this moment; Ray names them by what they do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::_run_cell"):
                found.append(int(path.parent.name))
    return found


def test_a_stream_is_begun_again_when_its_worker_is_killed(tmp_path, cluster):
    suite = tiny.vision_suite(tmp_path / "suite")
    bench(suite, RULES[:1], orders=3, out=tmp_path / "local")
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 120
        while not killed and time.monotonic() < until:
            for pid in working()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    bench(suite, RULES[:1], orders=3, out=tmp_path / "ray", engine="ray")
    killer.join()
    assert killed  # in the middle of a stream, whose result can only come from another worker
    assert told(tmp_path / "local") == told(tmp_path / "ray")
