"""The example for Kubernetes: valid objects, commands that preheat takes, and names that agree."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from preheat.model.config import VARIABLES
from preheat.store.remote.url import parse_remote
from preheat.tools.cli import _preheat
from tests.kubernetes.schema import faults
from tests.stories import blocks

yaml = pytest.importorskip("yaml")
pytest.importorskip("lightkube.models", reason="lightkube-models is not installed")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
GUIDES = Path(__file__).parents[2] / "docs" / "guides"
Object = dict[str, Any]


def documents() -> dict[str, Object]:
    """Return every object of the example, by file and name."""
    return {
        f"{path.stem}/{document['kind']}/{document['metadata']['name']}": document
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    }


ALL = documents()
PODS = {
    name: each["spec"]["template"]["spec"]
    for name, each in ALL.items()
    if each["kind"] in ("Job", "Deployment")
}


def named(kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in ALL.values() if each["kind"] == kind}


def containers() -> Iterator[tuple[str, Object]]:
    for name, pod in PODS.items():
        for each in (*pod.get("initContainers", ()), *pod["containers"]):
            yield f"{name}/{each['name']}", each


CONTAINERS = dict(containers())
RECORD = "record/Job/record-kernels-1-0"
MANIFEST = "/manifests/kernels-1.0.toml"
SERVERS = ("serve/Deployment/server", "serve-triton/Deployment/triton-server")


def variables(container: Object) -> dict[str, str]:
    """Return the environment of a container, as Kubernetes makes it."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        ((kind, reference),) = source.items()
        table = named("ConfigMap" if kind == "configMapRef" else "Secret")[reference["name"]]
        env |= table.get("data", {}) | table.get("stringData", {})
    return env | {row["name"]: row["value"] for row in container.get("env", ())}


def files_of(volume: Object) -> Object:
    """Return the files of a secret or a config map that is mounted; other volumes have none."""
    if "secret" in volume:
        table: Object = named("Secret")[volume["secret"]["secretName"]]["stringData"]
        return table
    if "configMap" in volume:
        table = named("ConfigMap")[volume["configMap"]["name"]]["data"]
        return table
    return {}


# Objects


@pytest.mark.parametrize("name", ALL)
def test_kubernetes_takes_the_object(name: str) -> None:
    assert faults(ALL[name]) == []


def test_the_guide_shows_the_files_as_they_are() -> None:
    shown = {block.title: block.text for block in blocks(GUIDES / "kubernetes.md")}
    for path in FOLDER.glob("*.yaml"):
        assert shown[path.name] == path.read_text()


def test_kubernetes_takes_the_job_of_the_guide_to_fleets() -> None:
    (job,) = (block.text for block in blocks(GUIDES / "fleet.md") if block.kind == "yaml")
    assert faults(yaml.safe_load(job)) == []


def test_the_schema_finds_faults() -> None:
    job = copy.deepcopy(ALL["bake/Job/bake-kernels-1-0"])
    pod = job["spec"]["template"]["spec"]
    pod["containers"][0]["comand"] = []
    pod["containers"][0]["resources"]["limits"] = "16Gi"
    pod["restartPolicy"] = 3
    del pod["containers"][0]["name"]
    where = "Job.spec.template.spec"
    assert faults(job) == [
        f"{where}.restartPolicy: 3 is not str",
        f"{where}.containers[0].resources.limits: '16Gi' is not a table",
        f"{where}.containers[0]: Container has no field 'comand'",
        f"{where}.containers[0]: Container needs the field 'name'",
    ]


@pytest.mark.parametrize("name", CONTAINERS)
def test_references_lead_somewhere(name: str) -> None:
    pod = PODS[name.rpartition("/")[0]]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    files = {
        f"{mount['mountPath']}/{file}"
        for mount in CONTAINERS[name].get("volumeMounts", ())
        for file in files_of(volumes[mount["name"]])
    }
    keys = {"PREHEAT_SIGNING_KEY", "PREHEAT_TRUSTED_KEYS"} & set(variables(CONTAINERS[name]))
    assert {variables(CONTAINERS[name])[key] for key in keys} == files
    ports = {port["name"] for port in CONTAINERS[name].get("ports", ())}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in CONTAINERS[name]:
            assert CONTAINERS[name][probe]["httpGet"]["port"] in ports


def test_pods_run_without_rights() -> None:
    for pod in PODS.values():
        assert pod["securityContext"]["runAsNonRoot"] is True
    for container in CONTAINERS.values():
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (
            False,
            {"drop": ["ALL"]},
        )


def test_only_pods_that_bake_have_the_private_key() -> None:
    holders = {name for name, pod in PODS.items() if "preheat-signing-key" in str(pod["volumes"])}
    assert holders == {"bake/Job/bake-kernels-1-0", "assemble/Job/assemble-kernels-1-0"}


def secrets_of(name: str) -> set[str]:
    """Return the names of the Secrets that the pods of an object have, as variables or files."""
    found = {
        source["secretRef"]["name"]
        for each, container in CONTAINERS.items()
        for source in container.get("envFrom", ())
        if each.startswith(f"{name}/") and "secretRef" in source
    }
    volumes = PODS[name]["volumes"]
    return found | {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


@pytest.mark.parametrize("name", PODS)
def test_readers_and_writers_have_secrets_of_their_own(name: str) -> None:
    writers = {"preheat-store-writer", "preheat-signing-key"}
    readers = {"preheat-store-reader", "preheat-trusted-keys"}
    expected = readers if name in SERVERS else set() if name == RECORD else writers
    assert secrets_of(name) == expected


def test_each_release_has_jobs_of_its_own() -> None:
    """A job is immutable. The name of a job, its image and its manifest are those of one release."""
    jobs = named("Job")
    assert len(jobs) == 3
    for name, job in jobs.items():
        (release,) = re.findall(r"-(\d+-\d+)$", name)
        assert job["spec"]["ttlSecondsAfterFinished"] > 0
        pod = job["spec"]["template"]["spec"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["image"].endswith(f":{release.replace('-', '.')}")
    assert f"-{release.replace('-', '.')}.toml" in MANIFEST


def test_the_command_of_the_guide_renames_every_release(tmp_path: Path) -> None:
    """After the `sed` of the guide, nothing is left of the old release."""
    page = (GUIDES / "kubernetes.md").read_text()
    (command,) = re.findall(r"^sed -i .*\*\.yaml$", page, re.MULTILINE)
    for path in FOLDER.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    for path in tmp_path.glob("*.yaml"):
        text = path.read_text()
        assert not re.findall(r"1-0\b|kernels-1\.0|:1\.0", text)
        assert [*map(faults, yaml.safe_load_all(text))] == [[]] * len([*yaml.safe_load_all(text)])
    assert "name: bake-kernels-1-1" in (tmp_path / "bake.yaml").read_text()
    assert "server:1.1" in (tmp_path / "serve.yaml").read_text()


def test_the_manifest_that_is_recorded_is_baked_checked_and_served() -> None:
    readers = {
        name: [word.partition("=")[2] or word for word in container["command"] if ".toml" in word]
        for name, container in CONTAINERS.items()
    }
    assert readers.pop(f"{RECORD}/record") == [MANIFEST]
    used = {name: words for name, words in readers.items() if words}
    assert len(used) == 3 + len(SERVERS)
    assert set(map(tuple, used.values())) == {(MANIFEST,)}
    for name in (f"{RECORD}/record", *used):
        (mount,) = (m for m in CONTAINERS[name]["volumeMounts"] if m["name"] == "manifests")
        assert mount["mountPath"] == str(Path(MANIFEST).parent)
        assert mount.get("readOnly", False) is (name in used)
        volumes = {volume["name"]: volume for volume in PODS[name.rpartition("/")[0]]["volumes"]}
        claim = volumes["manifests"]["persistentVolumeClaim"]["claimName"]
        assert named("PersistentVolumeClaim")[claim]["spec"]["accessModes"] == ["ReadWriteMany"]


# Commands and settings


def expanded(container: Object) -> list[str]:
    """Return the command with its variables, as Kubernetes expands them."""
    env = variables(container)
    return [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in container["command"]]


@pytest.mark.parametrize("name", CONTAINERS)
def test_preheat_takes_the_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("manifests/kernels-1.0.toml", "data/kernels.heat", "bundle/kernels.heat"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    first, *words = expanded(CONTAINERS[name])
    assert first == "preheat"
    words = [re.sub(r"(^|=)/(data|bundle|manifests)/", rf"\1{tmp_path}/\2/", word) for word in words]
    command: click.Command = _preheat
    context = None
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context)
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    command.make_context("preheat", words, parent=context)  # It raises for what it does not take.


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_setting_exists_and_has_a_valid_value(name: str) -> None:
    env = variables(CONTAINERS[name])
    known = {variable.name: variable for variable in VARIABLES}
    settings = {name for name in env if name.startswith("PREHEAT_")}
    assert settings <= set(known)
    for setting in settings:
        known[setting].read(env)
    if "PREHEAT_REMOTE" in env:
        assert parse_remote(env["PREHEAT_REMOTE"]).service == "s3"


def test_every_pod_is_a_shard() -> None:
    spec = ALL["bake/Job/bake-kernels-1-0"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert (
        f"--shard=auto/{spec['completions']}" in CONTAINERS["bake/Job/bake-kernels-1-0/bake"]["command"]
    )


@pytest.mark.parametrize("name", SERVERS)
def test_the_bundle_that_is_pulled_is_the_one_that_is_run(name: str) -> None:
    pulled = CONTAINERS[f"{name}/pull"]["command"]
    run = CONTAINERS[f"{name}/server"]["command"]
    (pin,) = (word for word in pulled if word.startswith("sha256:"))
    (output,) = (word.partition("=")[2] for word in pulled if word.startswith("--output="))
    assert f"--bundle={output}@{pin}" in run


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_checked_for_the_gpu_of_its_pod(name: str) -> None:
    command = CONTAINERS[f"{name}/server"]["command"]
    assert f"--manifest={MANIFEST}" in command
    assert not [word for word in command if word.startswith("--arch")]


def test_triton_writes_its_files_to_a_volume() -> None:
    server = CONTAINERS["serve-triton/Deployment/triton-server/server"]
    mounts = [mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")]
    directory = variables(server)["TRITON_CACHE_DIR"]
    assert any(directory.startswith(f"{mount}/") for mount in mounts)
    assert server["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", SERVERS)
def test_prometheus_finds_the_port(name: str) -> None:
    deployment = ALL[name]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    server = CONTAINERS[f"{name}/server"]
    (port,) = (port["containerPort"] for port in server["ports"] if port["name"] == "metrics")
    assert annotations["prometheus.io/port"] == str(port)
    assert variables(server)["PREHEAT_METRICS"] == f":{port}"
