"""The manifests for Kubernetes are valid, and lockstep understands what their pods are given. No cluster runs them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machines import ROOT, engine, worker_environment

from lockstep.settings.environment import find_place
from lockstep.world import World

FOLDER = ROOT / "examples/kubernetes"
OF_KUBERNETES = ("indexed_job.yaml",)
VERSIONS = ("1.33", "1.36")

_READ = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))"
_VALIDATE = """
import sys, yaml, kubernetes_validate
for part in yaml.safe_load_all(open(sys.argv[1])):
    kubernetes_validate.validate(part, sys.argv[2], strict=True)
    print(part["kind"])
"""


def run(program: str, *arguments: str) -> str:
    """What a program prints that uses the validator's packages."""
    packages = next((engine("kubernetes") / "lib").glob("python*/site-packages"))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=worker_environment({"PYTHONPATH": str(packages)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def parts(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(_READ, str(FOLDER / name)))
    return found


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OF_KUBERNETES)
def test_a_manifest_is_valid(name: str, version: str) -> None:
    assert run(_VALIDATE, str(FOLDER / name), version).split() == ["Service", "Job"]


def test_a_manifest_with_a_wrong_field_is_not_valid(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FOLDER / "indexed_job.yaml").read_text().replace("backoffLimitPerIndex", "backoffPerIndex"))
    with pytest.raises(AssertionError, match="backoffPerIndex"):
        run(_VALIDATE, str(wrong), VERSIONS[0])


def test_the_pods_of_the_indexed_job_are_the_workers_of_one_run(tmp_path: Path) -> None:
    service, job = parts("indexed_job.yaml")
    (tmp_path / "secret").write_text("pods")
    environ = variables(job["spec"]["template"]["spec"]["containers"][0])
    assert environ["LOCKSTEP_SECRET_FILE"] == "/secret/secret"
    environ["LOCKSTEP_SECRET_FILE"] = str(tmp_path / "secret")
    places = [
        find_place({**environ, "JOB_COMPLETION_INDEX": str(index)}) for index in range(job["spec"]["completions"])
    ]
    assert [(place.world.rank, place.world.size, place.world.local_size) for place in places] == [
        (index, 4, 1) for index in range(4)
    ]
    assert [place.slot for place in places] == [0, 1, 2, 3]
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert {place.address for place in places} == {f"{name}-0.{subdomain}"}
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


def test_the_pods_of_the_trainjob_are_the_workers_of_one_run() -> None:
    """With the variables that Kubeflow Trainer 2 sets."""
    (job,) = parts("trainjob.yaml")
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    assert trainer["command"][0] == "python"
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    place = find_place({**variables(trainer), **given, "PET_NODE_RANK": "3", "JOB_COMPLETION_INDEX": "3"})
    assert (place.world, place.address) == (World(3, 4, 0, 1), "train-node-0-0.train")
