"""deployments/ray-cluster.yaml and kuberay.yaml, read by Ray's own code."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from compose_file import DEPLOYMENTS
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config

from flows.services.records import HEARTBEAT_SECONDS
from tasks.config.loading import find_config, load_config
from tasks.runtime.placement import even_layout

RUNTIME = load_config(find_config("hh_gpu_7b_two_nodes")).offline_ppo.runtime


@pytest.fixture
def cluster_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / "ray-cluster.yaml").read_text())
    return found


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOYMENTS / "kuberay.yaml").read_text())
    return {document["kind"]: document for document in documents}


def _ray_cluster(job: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster that the operator makes for a job."""
    return {
        "apiVersion": job["apiVersion"],
        "kind": "RayCluster",
        "metadata": {"name": "rlhf", "namespace": "default"},
        "spec": job["spec"]["rayClusterSpec"],
    }


def test_ray_up_accepts_the_cluster(cluster_config: dict[str, Any]) -> None:
    prepared = prepare_config(cluster_config)
    validate_config(prepared)
    (node,) = prepared["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == RUNTIME.nodes - 1
    assert not [key for key in prepared if key not in _known_keys()]
    wrong = prepare_config({**cluster_config, "head_start_commands": []})
    with pytest.raises(jsonschema.ValidationError, match="head_start_commands"):
        validate_config(wrong)


def _known_keys() -> set[str]:
    file = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    return set(json.loads(file.read_text())["properties"])


def test_ray_is_started_with_options_that_it_has(cluster_config: dict[str, Any]) -> None:
    from ray.scripts.scripts import start

    known = {name for parameter in start.params for name in parameter.opts}
    for role in ("head", "worker"):
        _, command = cluster_config[f"{role}_start_ray_commands"]
        assert set(re.findall(r"(--[a-z-]+)", command)) <= known
        assert "RAY_AUTH_MODE=token" in command


def test_the_operator_makes_nodes_that_hold_the_two_node_config(
    manifests: dict[str, dict[str, Any]],
) -> None:
    config = _derive_autoscaling_config_from_ray_cr(_ray_cluster(manifests["RayJob"]))
    validate_config(config)
    types = config["available_node_types"]
    assert set(types) == {"headgroup", "gpu"}
    assert (types["gpu"]["min_workers"], types["gpu"]["max_workers"]) == (1, 1)
    places = [int(min(t["resources"]["GPU"], t["resources"]["CPU"])) for t in types.values()]
    layout = even_layout(places, RUNTIME.ranks, [RUNTIME.nodes])
    assert layout is not None and len(layout) == 2


def test_the_pods_fit_the_image_and_share_the_workspace(
    manifests: dict[str, dict[str, Any]],
) -> None:
    spec = manifests["RayJob"]["spec"]["rayClusterSpec"]
    assert spec["rayVersion"] == ray.__version__
    assert spec["authOptions"] == {"mode": "token"}
    pods = [
        group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    ]
    head, worker = (copy.deepcopy(pod["containers"][0]) for pod in pods)
    for container in (head, worker):
        container.pop("name")
        container.pop("ports", None)
    assert head == worker and pods[0]["volumes"] == pods[1]["volumes"]
    claim = manifests["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    claimed = [
        v["persistentVolumeClaim"]["claimName"]
        for v in pods[0]["volumes"]
        if len(v) and "persistentVolumeClaim" in v
    ]
    assert claimed == [claim["metadata"]["name"]]
    image = (DEPLOYMENTS / "Containerfile").read_text()
    environment = {entry["name"]: entry.get("value") for entry in head["env"]}
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)
    (tracking,) = [one for one in head["env"] if one["name"] == "RLHF_TRACKING_URI"]
    secret = {"name": "rlhf-servers", "key": "RLHF_TRACKING_URI"}
    assert tracking["valueFrom"] == {"secretKeyRef": secret}
    assert f"RLHF_HOME={environment['RLHF_HOME']}" in image
    assert {mount["name"] for mount in head["volumeMounts"]} == {
        v["name"] for v in pods[0]["volumes"]
    }


def test_no_secret_lies_in_the_manifest(manifests: dict[str, dict[str, Any]]) -> None:
    assert "Secret" not in manifests
    head = manifests["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["containers"][0]["envFrom"] == [{"secretRef": {"name": "rlhf-servers"}}]
