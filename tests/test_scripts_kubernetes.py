"""scripts/kubernetes.yaml: it parses, its parts refer to each other, and its command is a valid configuration."""

from pathlib import Path

import pytest
import yaml

from stoker.trainer.cli.main import main
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.node_counts import usable_nodes
from stoker.trainer.distributed.placement import resolve_placement

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "kubernetes.yaml"


@pytest.fixture
def manifests():
    return {document["kind"]: document for document in yaml.safe_load_all(SCRIPT.read_text())}


@pytest.fixture
def container(manifests):
    (container,) = manifests["Job"]["spec"]["template"]["spec"]["containers"]
    return container


def test_pods_find_the_first_one(manifests, container):
    service, job = manifests["Service"], manifests["Job"]
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    environ = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    assert environ["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert int(environ["MASTER_PORT"]) == service["spec"]["ports"][0]["port"]
    config = load_run_config(overrides=container["command"][2:])
    placement = resolve_placement(config.root.trainer, environ)
    assert (placement.node_rank, placement.rendezvous) == (1, ("stoker-0.stoker", 29400))


def test_the_command_is_valid_and_fits_the_job(manifests, container, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert container["command"][:2] == ["stoker", "train"]
    overrides = container["command"][2:]
    assert main(["config", *overrides]) == 0, capsys.readouterr().err
    root, spec = load_run_config(overrides=overrides).root, manifests["Job"]["spec"]
    assert spec["completions"] == spec["parallelism"] == root.trainer.num_nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == root.trainer.devices
    assert usable_nodes(root, 1, 8) == 1
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(root.exp_manager.explicit_log_dir).startswith(mounts["workspace"])
    assert {volume["name"] for volume in spec["template"]["spec"]["volumes"]} == set(mounts)


def test_bad_input_ends_the_job_and_an_eviction_does_not(manifests):
    spec = manifests["Job"]["spec"]
    actions = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert actions["FailJob"]["onExitCodes"]["values"] == [2]
    assert actions["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "what a podFailurePolicy needs"
