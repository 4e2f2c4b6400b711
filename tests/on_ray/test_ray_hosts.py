"""`lockstep run --on ray` over several hosts, which are network namespaces."""

from pathlib import Path

import pytest
from hosts import hosts
from launched import launched
from ray_clusters import MARK, needs_ray, ray_cluster
from ray_launches import START_S, launched_on, workers_of

pytestmark = needs_ray

EPOCHS = 60


def test_a_worker_whose_host_is_lost_is_replaced_on_another_host(tmp_path: Path) -> None:
    with launched(tmp_path / "alone", "-n", "1", epochs=EPOCHS, pause_s=0.0) as one:
        alone = one.finish()
    folder = tmp_path / "ray"
    with hosts([1, 1, 1]) as network:
        inside = tuple(("ip", "netns", "exec", namespace) for namespace in network.namespaces)
        with (
            ray_cluster(1, 1, 1, inside=inside, ips=network.addresses) as cluster,
            launched_on(cluster, folder, "-n", "2", "--placement", "spread", epochs=EPOCHS, pause_s=0.5) as run,
        ):
            run.wait_for(r"^step \d+ workers 2$", within_s=START_S)
            nodes = {slot: int(Path(worker.environ()[MARK]).name[0]) for slot, worker in workers_of(folder).items()}
            lost = next(slot for slot, node in nodes.items() if node != 0)  # node 0 is the cluster's head
            cluster.kill_node(nodes[lost])
            run.wait_for(rf"worker {lost} .*was killed by SIGKILL", within_s=60)
            run.await_workers(2, within_s=START_S)
            assert int(Path(workers_of(folder)[lost].environ()[MARK]).name[0]) not in nodes.values()
            assert run.finish(within_s=START_S) == alone


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_is_killed_comes_back_on_its_host(tmp_path: Path, killed: int) -> None:
    with launched(tmp_path / "alone", "-n", "1", epochs=EPOCHS, pause_s=0.0) as one:
        alone = one.finish()
    folder = tmp_path / "ray"
    with hosts([1, 1]) as network:
        inside = tuple(("ip", "netns", "exec", namespace) for namespace in network.namespaces)
        with (
            ray_cluster(1, 1, inside=inside, ips=network.addresses) as cluster,
            launched_on(cluster, folder, "-n", "2", epochs=EPOCHS) as run,
        ):
            run.wait_for(r"^step \d+ workers 2$", within_s=START_S)
            workers_of(folder)[killed].kill()
            run.wait_for(rf"worker {killed} .*was killed by SIGKILL", within_s=60)
            run.await_workers(2, within_s=START_S)
            assert run.finish(within_s=START_S) == alone


def test_a_calm_run_over_hosts_and_one_whose_workers_are_all_killed_have_the_bits_of_one_worker(tmp_path: Path) -> None:
    with launched(tmp_path / "alone", "-n", "1", epochs=EPOCHS, pause_s=0.0) as one:
        alone = one.finish()
    with hosts([1, 1]) as network:
        inside = tuple(("ip", "netns", "exec", namespace) for namespace in network.namespaces)
        with ray_cluster(1, 1, inside=inside, ips=network.addresses) as cluster:
            with launched_on(cluster, tmp_path / "calm", "-n", "2", epochs=EPOCHS, pause_s=0.0) as run:
                assert run.finish(within_s=START_S) == alone
            folder = tmp_path / "ray"
            with launched_on(cluster, folder, "-n", "2", "--checkpoint-every", "2 steps", epochs=EPOCHS) as run:
                run.wait_for(r"^step 9 workers 2$", within_s=START_S)
                for worker in workers_of(folder).values():
                    worker.kill()
                again = run.wait_for("all 2 workers start again", within_s=60)
                first = run.wait_for(r"^step \d+ workers 2$", after=again, within_s=START_S)
                assert int(run.lines[first][1].split()[1]) > 3, "it began at a checkpoint"
                assert run.finish(within_s=START_S) == alone
