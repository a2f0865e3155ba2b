"""Checks that k8s/ fits KubeRay's CRDs, the image, the jobs and itself; starts no cluster."""

import copy
import functools
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT.parent / "shared" / "kuberay-crds"
DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")
FILES = {
    path.name: list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "k8s").glob("*.yaml"))
}
DOCUMENTS = [doc for documents in FILES.values() for doc in documents]
RAY_DOCUMENTS = [doc for doc in DOCUMENTS if doc["apiVersion"].startswith("ray.io/")]
JOBS = [doc for doc in RAY_DOCUMENTS if doc["kind"] == "RayJob"]
OWN = ("ray.io/", "kustomize.config.k8s.io/", "monitoring.coreos.com/")  # kinds that Kubernetes does not bring along
PLAIN_DOCUMENTS = [doc for doc in DOCUMENTS if not doc["apiVersion"].startswith(OWN)]
SCHEMAS = kubernetes_validate.latest_version()

each_ray_document = pytest.mark.parametrize("doc", RAY_DOCUMENTS, ids=lambda doc: doc["metadata"]["name"])
each_job = pytest.mark.parametrize("doc", JOBS, ids=lambda doc: doc["metadata"]["name"])
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason="no CRDs of KubeRay in ../shared/kuberay-crds")


def cluster_spec(doc: dict[str, Any]) -> dict[str, Any]:
    """The RayClusterSpec of a RayCluster or a RayJob."""
    return doc["spec"].get("rayClusterSpec", doc["spec"])


def ray_pods(doc: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = cluster_spec(doc)
    workers = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]["spec"], **workers}


def all_pods(doc: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod specs in which Ray runs, and the one that submits the job."""
    submitter = doc["spec"].get("submitterPodTemplate")
    return ray_pods(doc) | ({"submitter": submitter["spec"]} if submitter else {})


def all_containers(doc: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every container with the name of its pod, and the autoscaler's, which KubeRay adds to the head."""
    options = cluster_spec(doc).get("autoscalerOptions")
    containers = [(name, container) for name, pod in all_pods(doc).items() for container in pod["containers"]]
    return containers + ([("autoscaler", options)] if options else [])


def quantity(text: str | int) -> float:
    number, suffix = re.fullmatch(r"([\d.]+)(m|[KMGT]i)?", str(text)).groups()
    return float(number) * {None: 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[suffix]


def gpus(pod: dict[str, Any]) -> int:
    return sum(int(c["resources"]["limits"].get("nvidia.com/gpu", 0)) for c in pod["containers"])


def mount_paths(pod: dict[str, Any], source: str) -> set[str]:
    volumes = {volume["name"] for volume in pod["volumes"] if source in volume}
    mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
    return {mount["mountPath"] for mount in mounts if mount["name"] in volumes}


def entrypoint(doc: dict[str, Any]) -> tuple[Path, dict[str, str | None]]:
    """The script of a RayJob's entrypoint, as it lies in this repository, and its flags with their values."""
    program, script, *arguments = shlex.split(doc["spec"]["entrypoint"])
    assert program == "python", f"the entrypoint starts {program!r}, not python"
    workdir = re.search(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[1]
    path = PurePosixPath(script)
    assert path.is_relative_to(workdir), f"the entrypoint's {script} does not lie in the image's {workdir}"
    flags = {}
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if argument.startswith("--"):
            flags[argument] = None if following.startswith("--") else following
    return ROOT / path.relative_to(workdir), flags


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = strict(schema["items"])
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    elif schema.get("nullable"):
        result["type"] = [schema["type"], "null"]
    return result


@functools.cache
def crd_validator(kind: str) -> jsonschema.Draft202012Validator:
    text = (CRDS / f"ray.io_{kind.lower()}s.yaml").read_text(encoding="utf-8")
    # Parsed in C where PyYAML can: in Python it takes some ten seconds.
    crd = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
    return jsonschema.Draft202012Validator(strict(version["schema"]["openAPIV3Schema"]))


def crd_errors(doc: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in crd_validator(doc["kind"]).iter_errors(doc)]


@needs_crds
@each_ray_document
def test_manifest_fits_the_crd(doc: dict[str, Any]) -> None:
    assert doc["apiVersion"] == "ray.io/v1", f"{doc['kind']} is of {doc['apiVersion']}, not ray.io/v1"
    assert not crd_errors(doc), "\n".join(crd_errors(doc))


@needs_crds
@each_ray_document
@pytest.mark.parametrize("place", ["spec", "group", "pod", "container"])
def test_crd_refuses_a_typo(doc: dict[str, Any], place: str) -> None:
    doc = copy.deepcopy(doc)
    group = cluster_spec(doc)["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    places = {"spec": doc["spec"], "group": group, "pod": pod, "container": pod["containers"][0]}
    places[place]["tpyo"] = 1
    errors = crd_errors(doc)
    assert ["'tpyo' was unexpected" in error for error in errors] == [True], f"a typo in a {place}: {errors}"


@pytest.mark.parametrize("doc", PLAIN_DOCUMENTS, ids=lambda doc: f"{doc['kind']}-{doc['metadata']['name']}")
def test_what_is_kubernetes_own_fits_its_schema(doc: dict[str, Any]) -> None:
    kubernetes_validate.validate(doc, SCHEMAS, strict=True)


@each_ray_document
def test_pods_fit_the_schema_of_pods(doc: dict[str, Any]) -> None:
    """KubeRay's own schema leaves out what it does not look at."""
    for name, pod in all_pods(doc).items():
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
        kubernetes_validate.validate(made, SCHEMAS, strict=True)


@needs_crds
def test_the_head_that_may_be_lost_is_a_patch_of_the_gpu_cluster() -> None:
    (kustomization,) = FILES["kustomization.yaml"]
    assert set(kustomization["resources"]) <= FILES.keys()
    ((doc,), redis) = (FILES["ray-cluster.gpu.yaml"], FILES["redis.yaml"])
    (patch,) = kustomization["patches"]
    assert patch["target"] == {"kind": doc["kind"], "name": doc["metadata"]["name"]}
    (change,) = yaml.safe_load(patch["patch"])
    assert (change["op"], change["path"]) == ("add", "/spec/gcsFaultToleranceOptions")
    patched = copy.deepcopy(doc)
    patched["spec"]["gcsFaultToleranceOptions"] = change["value"]
    assert not crd_errors(patched), "\n".join(crd_errors(patched))
    service = next(other for other in redis if other["kind"] == "Service")
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert change["value"]["redisAddress"] == address
    secrets = re.findall(r"secretKeyRef: \{name: ([\w-]+), key: (\w+)\}", (ROOT / "k8s" / "redis.yaml").read_text())
    assert set(secrets) == {tuple(change["value"]["redisPassword"]["valueFrom"]["secretKeyRef"].values())}


@needs_crds
def test_the_parts_that_the_page_adds_fit_the_manifests() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    texts = re.findall(r"```yaml\n((?:spec|metadata):.*?)```", page, re.DOTALL)
    assert len(texts) == 6
    cluster, job = FILES["ray-cluster.gpu.yaml"][0], FILES["ray-job.train-images.yaml"][0]
    for text in texts:
        part = yaml.safe_load(text)
        patched = copy.deepcopy(job if "in a RayJob" in text else cluster)
        for place, values in part.items():
            assert not patched[place].keys() & values.keys(), "it would replace what is there"
            patched[place] |= values
        assert not crd_errors(patched), "\n".join(crd_errors(patched))


def test_notebooks_have_a_pod_of_their_own_and_a_token() -> None:
    cluster, service = FILES["ray-cluster.notebook.yaml"]
    group = next(group for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] == "notebook")
    assert group["rayStartParams"]["num-cpus"] == "0", "Ray would place work beside the notebooks"
    (container,) = group["template"]["spec"]["containers"]
    token = next(variable for variable in container["env"] if variable["name"] == "JUPYTER_TOKEN")
    secret = token["valueFrom"]["secretKeyRef"]
    of_ray = {"name": cluster["spec"]["authOptions"]["secretName"], "key": "auth_token"}
    assert secret == of_ray, f"the notebook server has the token of {secret}, and Ray that of {of_ray}"
    assert service["spec"]["type"] == "ClusterIP", "the notebook server is open to the outside"
    assert service["spec"]["selector"] == group["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    started = container["lifecycle"]["postStart"]["exec"]["command"][-1]
    assert subprocess.run(["bash", "-n", "-c", started], check=False).returncode == 0
    assert (ROOT / "jobs" / "notebooks").is_dir()
    assert "notebook]" in DOCKERFILE, "the image has no notebook server"


@each_ray_document
def test_ray_asks_for_a_token(doc: dict[str, Any]) -> None:
    """A cluster without one lets every pod that reaches its head run programs."""
    options = cluster_spec(doc).get("authOptions", {})
    assert options.get("mode") == "token", f"{doc['metadata']['name']} asks for no token: {options}"


def test_commands_read_the_token_where_kuberay_has_it() -> None:
    """KubeRay takes it from `secretName`; without that it makes a Secret of the cluster's name. The key is its own."""
    clusters = [doc for doc in RAY_DOCUMENTS if doc["kind"] == "RayCluster"]
    there = {doc["spec"]["authOptions"].get("secretName", doc["metadata"]["name"]) for doc in clusters}
    texts = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("k8s/*.yaml"), ROOT / "docs" / "operations.md")]
    read = re.findall(r"kubectl get secret ([\w-]+) -o jsonpath='\{\.data\.(\w+)\}'", "\n".join(texts))
    assert {name for name, _ in read} == there, f"the commands read {read}, and the clusters' Secrets are {there}"
    assert {key for _, key in read} == {"auth_token"}, f"KubeRay's key is auth_token, and the commands read {read}"
    (made,) = re.findall(r"create secret generic raylance-notebook --from-literal=(\w+)=", "\n".join(texts))
    assert made == "auth_token", f"KubeRay's key is auth_token, and the Secret is made with {made}"


@each_ray_document
def test_one_ray_version(doc: dict[str, Any]) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^ray==(\S+)", constraints, re.MULTILINE)[1]
    (default,) = re.findall(r"^ARG RAY=([\d.]+)\nFROM rayproject/ray:\$\{RAY\}-py311-gpu$", DOCKERFILE, re.MULTILINE)
    versions = {"constraints.txt": pinned, "Dockerfile": default, "rayVersion": cluster_spec(doc)["rayVersion"]}
    assert len(set(versions.values())) == 1, f"Ray refuses a cluster of mixed versions: {versions}"


def test_the_image_keeps_the_ray_that_it_is_built_for() -> None:
    """The Ray that pip takes for raylance is the one of the base image, whatever constraints.txt names."""
    (script,) = re.findall(r'^RUN sed -i "(.+)" constraints.txt$', DOCKERFILE, re.MULTILINE)
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    made = subprocess.run(
        ["sed", script.replace("${RAY}", "9.9.9")], input=text, capture_output=True, text=True, check=True
    )
    assert [line for line in made.stdout.splitlines() if re.match(r"ray\b", line)] == ["ray==9.9.9"]
    assert made.stdout.count("\n") == text.count("\n")


def test_one_image() -> None:
    pods = [pod for doc in RAY_DOCUMENTS for pod in all_pods(doc).values()]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert len(images) == 1, f"head, workers and submitter need the same code, and run {sorted(images)}"


def test_image_is_built_from_this_repository_and_not_by_root() -> None:
    copies = [line.split()[:-1] for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)]
    sources = {word for words in copies for word in words if not word.startswith("--")}
    missing = sorted(source for source in sources if not (ROOT / source).exists())
    assert {"raylance/", "jobs/"} <= sources, f"the Dockerfile copies only {sorted(sources)}"
    assert not missing, f"the Dockerfile copies what is not there: {missing}"
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users == ["1000"], f"runAsNonRoot is checked against a number, and the image has USER {users}"


@each_ray_document
def test_every_mount_has_its_volume_and_every_claim_its_document(doc: dict[str, Any]) -> None:
    claims = {other["metadata"]["name"] for other in DOCUMENTS if other["kind"] == "PersistentVolumeClaim"}
    for name, pod in all_pods(doc).items():
        volumes = pod.get("volumes", [])
        declared = {volume["name"] for volume in volumes}
        mounted = {mount["name"] for c in pod["containers"] for mount in c.get("volumeMounts", [])}
        assert mounted == declared, f"{name} mounts {sorted(mounted)} and declares {sorted(declared)}"
        found = [volume["persistentVolumeClaim"] for volume in volumes if "persistentVolumeClaim" in volume]
        used = {claim["claimName"] for claim in found}
        assert used <= claims, f"{name} uses the claims {used}, and k8s/ declares {claims}"


@pytest.mark.parametrize("name", FILES)
def test_claims_can_be_shared_and_outlive_jobs(name: str) -> None:
    claims = [doc for doc in FILES[name] if doc["kind"] == "PersistentVolumeClaim"]
    assert claims in ([], FILES[name]), f"kubectl delete -f {name} would delete the checkpoints as well"
    modes = [claim["spec"]["accessModes"] for claim in claims]
    assert all(mode == ["ReadWriteMany"] for mode in modes), f"pods of several nodes cannot mount {modes}"


@each_ray_document
def test_checkpoints_lie_at_the_same_path_everywhere(doc: dict[str, Any]) -> None:
    paths = {name: mount_paths(pod, "persistentVolumeClaim") for name, pod in ray_pods(doc).items()}
    assert all(found == paths["head"] for found in paths.values()), f"checkpoints are mounted at {paths}"
    if all("://" not in entrypoint(job)[1]["--storage-path"] for job in JOBS if job is doc):
        assert paths["head"], "no pod mounts the checkpoints"


@each_ray_document
def test_shared_memory_holds_the_object_store(doc: dict[str, Any]) -> None:
    cluster = cluster_spec(doc)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod, name = group["template"]["spec"], group.get("groupName", "head")
        (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
        assert shm["medium"] == "Memory", f"the shared memory of {name} lies on a disk: {shm}"
        assert mount_paths(pod, "emptyDir") == {"/dev/shm"}, f"{name} does not mount it at /dev/shm"
        store, size = int(group["rayStartParams"]["object-store-memory"]), quantity(shm["sizeLimit"])
        memory = quantity(pod["containers"][0]["resources"]["limits"]["memory"])
        assert store < size < memory, f"{name}: not store {store} < shm {size} < memory {memory}"


@each_ray_document
def test_head_does_no_work_and_pods_without_gpus_offer_none(doc: dict[str, Any]) -> None:
    params = cluster_spec(doc)["headGroupSpec"]["rayStartParams"]
    assert params["num-cpus"] == params["num-gpus"] == "0", f"Ray would place work on the head: {params}"
    for group in cluster_spec(doc)["workerGroupSpecs"]:
        if not gpus(group["template"]["spec"]):
            offered = group["rayStartParams"].get("num-gpus")
            assert offered == "0", f"{group['groupName']} may offer GPUs that it did not ask for"


@each_ray_document
def test_every_container_has_requests_within_limits(doc: dict[str, Any]) -> None:
    for name, container in all_containers(doc):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= requests.keys() == limits.keys(), f"{name}: {requests} against {limits}"
        over = [key for key in requests if quantity(requests[key]) > quantity(limits[key])]
        assert not over, f"{name} requests more {over} than its limit"


def every_pod() -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Name, spec and labels of all pods of k8s/."""
    for doc in RAY_DOCUMENTS:
        for name, spec in all_pods(doc).items():
            submitter = doc["spec"].get("submitterPodTemplate", {}).get("metadata")
            labels = submitter["labels"] if name == "submitter" else {"ray.io/is-ray-node": "yes"}
            yield f"{doc['metadata']['name']}-{name}", spec, labels
    redis = next(doc for doc in DOCUMENTS if doc["kind"] == "StatefulSet")["spec"]["template"]
    yield "redis", redis["spec"], redis["metadata"]["labels"]


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
PROFILE = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}  # what pod and container set together
OF_CONTAINERS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("spec", [pytest.param(spec, id=name) for name, spec, _ in every_pod()])
def test_pods_fit_the_restricted_profile(spec: dict[str, Any]) -> None:
    """A namespace that enforces this one of Kubernetes' Pod Security Standards admits them."""
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all(VOLUMES & volume.keys() for volume in spec.get("volumes", []))
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        context = spec["securityContext"] | container["securityContext"]
        assert context | PROFILE | OF_CONTAINERS == context, f"{container['name']}: {context}"
        assert not context.get("privileged")
        assert context.get("runAsUser") != 0
        assert not any("hostPort" in port for port in container.get("ports", []))


@each_ray_document
def test_containers_run_as_the_user_of_the_image_without_privileges(doc: dict[str, Any]) -> None:
    """Also the autoscaler's, which KubeRay adds."""
    assert {pod["securityContext"]["runAsUser"] for pod in all_pods(doc).values()} == {1000}
    for name, container in all_containers(doc):
        context = container["securityContext"]
        assert context | OF_CONTAINERS == context, f"{name}: {context}"
        assert not context.keys() & {"runAsUser", "runAsNonRoot"}, f"a container of {name} overrides its pod's"


def test_every_pod_has_a_network_policy_and_no_port_is_open_to_all() -> None:
    policies = {doc["metadata"]["name"]: doc["spec"] for doc in FILES["network-policy.yaml"]}
    for name, _, labels in every_pod():
        selected = [policy["podSelector"]["matchLabels"].items() <= labels.items() for policy in policies.values()]
        assert any(selected) or name.endswith("-submitter"), f"{name} is open to all"
    for spec in policies.values():
        assert spec["policyTypes"] == ["Ingress"]
        for rule in spec["ingress"]:
            assert all(peer.get("podSelector") or peer.get("namespaceSelector") for peer in rule["from"]), rule
    by_port = {}
    for rule in policies["raylance-ray"]["ingress"]:
        for port in rule.get("ports", [{"port": "all"}]):
            by_port.setdefault(port["port"], []).extend(rule["from"])
    ray = {"podSelector": {"matchLabels": {"ray.io/is-ray-node": "yes"}}}
    assert by_port.keys() == {"all", 8265, 8080}
    assert by_port["all"] == [ray], "GCS, client server and notebook are for Ray's own pods"
    assert all("podSelector" in peer for peer in by_port[8265]), "a whole namespace may submit jobs"
    assert policies["raylance-redis"]["ingress"] == [{"from": [ray], "ports": [{"port": 6379}]}]


@each_ray_document
def test_credentials_come_from_an_optional_secret(doc: dict[str, Any]) -> None:
    for name, pod in ray_pods(doc).items():
        (secret,) = (source["secretRef"] for source in pod["containers"][0]["envFrom"])
        assert secret["optional"] is True, f"{name} would not start without {secret['name']}"


@each_ray_document
def test_replicas_lie_within_their_bounds(doc: dict[str, Any]) -> None:
    cluster = cluster_spec(doc)
    for group in cluster["workerGroupSpecs"]:
        low, now, high = (group[key] for key in ("minReplicas", "replicas", "maxReplicas"))
        assert low <= now <= high, f"{group['groupName']}: {low} ≤ {now} ≤ {high} does not hold"
        assert low == high or cluster.get("enableInTreeAutoscaling"), f"nothing scales {group['groupName']}"


def test_cluster_scales_its_decoders_with_autoscaler_v2() -> None:
    spec = next(doc["spec"] for doc in RAY_DOCUMENTS if doc["kind"] == "RayCluster")
    assert spec["enableInTreeAutoscaling"] is True, "nothing scales the decoders"
    assert spec["autoscalerOptions"]["version"] == "v2", "the autoscaler is not v2"
    groups = spec["workerGroupSpecs"]
    without_gpus = [group for group in groups if not gpus(group["template"]["spec"])]
    assert len(without_gpus) < len(groups), "the ranks have no GPU"
    scaling = [group for group in without_gpus if group["minReplicas"] < group["maxReplicas"]]
    assert scaling, "no group of CPU pods scales for decoders"


@each_job
def test_entrypoint_is_a_script_that_knows_its_flags(
    doc: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, flags = entrypoint(doc)
    assert script.is_file(), f"the entrypoint runs {script.relative_to(ROOT)}, which does not exist"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)  # as Python does
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    unknown = set(flags) - set(re.findall(r"--[a-z][a-z0-9-]*", shown))
    assert not unknown, f"{script.name} has no {sorted(unknown)}; its help says:\n{shown}"


@each_job
def test_a_retry_finds_the_checkpoint(doc: dict[str, Any]) -> None:
    _, flags = entrypoint(doc)
    assert flags["--run-name"], "without a fixed run name a retry starts from nothing"
    storage, mounts = flags["--storage-path"], mount_paths(ray_pods(doc)["head"], "persistentVolumeClaim")
    is_kept = "://" in storage or any(PurePosixPath(storage).is_relative_to(mount) for mount in mounts)
    assert is_kept, f"{storage} is lost with its pod: the shared volume is at {mounts}"


def test_the_job_in_an_object_store_is_the_other_one_without_a_volume() -> None:
    (job,), (of_s3,) = FILES["ray-job.train-images.yaml"], copy.deepcopy(FILES["ray-job.train-images-s3.yaml"])
    (_, flags), (_, flags_of_s3) = entrypoint(job), entrypoint(of_s3)
    assert flags_of_s3.pop("--storage-path").startswith("s3://")
    assert flags_of_s3.items() == {name: value for name, value in flags.items() if name != "--storage-path"}.items()
    job = copy.deepcopy(job)
    for pod in all_pods(job).values():
        for part in (pod, *pod["containers"]):
            for kind in {"volumes", "volumeMounts"} & part.keys():
                part[kind] = [each for each in part[kind] if each["name"] != "checkpoints"]
    for pod in all_pods(of_s3).values():
        assert pod.pop("imagePullSecrets"), "the image of a registry that asks for a password is not pulled"
    for doc in (job, of_s3):
        doc["metadata"]["name"] = ""
        doc["spec"] |= {"entrypoint": ""}
        doc["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["args"] = []
    assert of_s3 == job


@each_job
def test_job_has_a_gpu_for_every_rank_and_none_idle(doc: dict[str, Any]) -> None:
    _, flags = entrypoint(doc)
    groups = cluster_spec(doc)["workerGroupSpecs"]
    offered = sum(group["replicas"] * gpus(group["template"]["spec"]) for group in groups)
    assert "--use-gpu" in flags, "the job runs on GPU pods without using them"
    assert offered == int(flags["--num-workers"]), f"{offered} GPUs for {flags['--num-workers']} ranks"


@each_job
def test_job_ends_and_gives_its_cluster_back(doc: dict[str, Any]) -> None:
    spec = doc["spec"]
    assert spec["submissionMode"] == "K8sJobMode", f"the job is submitted by {spec['submissionMode']}"
    assert spec["backoffLimit"] > 0, "a lost head ends the run"
    assert spec["shutdownAfterJobFinishes"] is True, "the cluster stays when the job has ended"
    assert spec["ttlSecondsAfterFinished"] > 0, "the logs are gone when the job has ended"
    waiting, running = spec["preRunningDeadlineSeconds"], spec["activeDeadlineSeconds"]
    assert 0 < waiting < running, f"an attempt waits {waiting} s of the {running} s that it lasts"
