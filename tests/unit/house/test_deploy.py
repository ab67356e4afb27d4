"""Files of deploy/: command lines are Quire's, names and ports agree, and the page says of each file whether it ran."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import rules
from quire.config.env import CACHE_DIR, variable
from quire.config.serve import server_names
from quire.entry.exit_codes import MISUSED, NO_MEMORY, REFUSED
from quire.entry.http.observed.request_metrics import REFUSALS
from quire.observe.metrics import FAMILIES
from quire.router import metrics as router_metrics

from ...support.documented import quire_commands, refusal

DEPLOY = rules.ROOT / "deploy"
SETS = [DEPLOY / "kubernetes" / name for name in ("engine", "replicas", "scaled", "apart")]
KEYS = DEPLOY / "kubernetes" / "keys"  # a component of the others
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
DOCKERFILES = sorted((DEPLOY / "docker").iterdir())
PROXIES = sorted((DEPLOY / "proxies").iterdir())
UNIT = DEPLOY / "systemd" / "quire.service"
FILES = DEPLOY / "systemd" / "files.conf"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
UPDATE = DEPLOY / "rolling_update.py"
SERIES = {"counter": "_total", "gauge": "", "histogram": "_bucket"}  # kind of a metric -> end of its series in rules
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def objects(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def pods(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["spec"]["template"] for one in found if one["kind"] in ("StatefulSet", "Deployment")]


def words_of(pod: dict[str, Any]) -> list[str]:
    """Return the words behind `quire` that a pod's container runs."""
    (container,) = pod["spec"]["containers"]
    assert container["command"][0] == "quire"
    return [*container["command"][1:], *container["args"]]


def value_of(flag: str, words: list[str]) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"{flag}="))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_a_manifest_is_read(path: Path) -> None:
    """A Kustomization names files that exist; containers run command lines of Quire."""
    found = objects(path.read_text())
    assert found and all(one["apiVersion"] and one["kind"] for one in found)
    for one in found:
        if one["kind"] == "Kustomization":
            assert all((path.parent / resource).exists() for resource in one["resources"])
    assert [why for pod in pods(found) if (why := refusal(words_of(pod)))] == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("folder", SETS, ids=lambda path: path.name)
def test_what_would_be_applied(folder: Path) -> None:
    """Names agree: services choose pods, routers know every engine, and engines read each other where one listens."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
    found = objects(done.stdout)
    services = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "Service"}
    for service in services.values():
        assert (
            len([pod for pod in pods(found) if service["selector"].items() <= pod["metadata"]["labels"].items()]) == 1
        )
    engines, asked, shared, read = set(), set(), set(), set()
    most = {
        one["spec"]["scaleTargetRef"]["name"]: one["spec"]["maxReplicas"]
        for one in found
        if one["kind"] == "HorizontalPodAutoscaler"
    }
    for one in found:
        if one["kind"] == "StatefulSet":
            name, service, words = (
                one["metadata"]["name"],
                one["spec"]["serviceName"],
                words_of(one["spec"]["template"]),
            )
            port = value_of("--port", words)
            assert services[service]["ports"][0]["port"] == int(port)
            number = most.get(name) or one["spec"]["replicas"]
            assert (name in most) != ("replicas" in one["spec"])
            engines |= {f"http://{name}-{i}.{service}:{port}" for i in range(number)}
    for pod in pods(found):
        words, (container,) = words_of(pod), pod["spec"]["containers"]
        assert refusal(words) == "" and container["image"].startswith("registry.example/quire:")
        asked |= {word.partition("=")[2] for word in words if re.match("--(prefill-)?backend=", word)}
        shared |= {word.partition("=")[2] for word in words if word.startswith("--kv-share=")}
        read |= {word.partition("=")[2] for word in words if word.startswith("--kv-peers=")}
        if any(word.startswith("--kv-share=") or word.startswith("--kv-peers=") for word in words):
            keys = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
            assert not keys[variable("cluster_key")].get("optional")
        assert container["ports"][0]["containerPort"] == int(value_of("--port", words))
        assert {container[probe]["httpGet"]["path"] for probe in PROBES if probe in container} == {"/ready", "/live"}
        assert pod["spec"]["terminationGracePeriodSeconds"] > int(value_of("--shutdown-timeout", words))
    routed = any(words_of(pod)[0] == "route" for pod in pods(found))
    assert asked == (engines if routed else set()) and shared == read


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_a_file_of_keys_from_a_secret(tmp_path: Path) -> None:
    """The example of the page gives each container the file that its variable names; its user may read it."""
    page = (rules.ROOT / "docs" / "deploying.md").read_text()
    (example,) = [block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "components:" in block]
    place = os.path.relpath(DEPLOY, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(example.replace("deploy/", f"{place}/"))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=True)
    found = pods(objects(done.stdout))
    assert {words_of(pod)[0] for pod in found} == {"serve", "route"}
    for pod in found:
        (container,) = pod["spec"]["containers"]
        (given,) = [one["value"] for one in container["env"] if one["name"] == variable("api_key_file")]
        (mount,) = [one for one in container["volumeMounts"] if given.startswith(f"{one['mountPath']}/")]
        (secret,) = [one["secret"] for one in pod["spec"]["volumes"] if one["name"] == mount["name"]]
        assert "subPath" not in mount, "the kubelet would not replace the file"
        assert f"secret generic {secret['secretName']} --from-file={Path(given).name}" in page
        assert secret["defaultMode"] == 0o440 and pod["spec"]["securityContext"]["fsGroup"]


def test_autoscalers_ask_for_a_metric_that_there_is() -> None:
    """The adapter's rule names a metric of the registry as the autoscaler does; KEDA scales in the same way."""
    (scaler,), (keda,), (rules_of,), (monitor,) = (
        objects((DEPLOY / "kubernetes" / "scaled" / f"{name}.yaml").read_text())
        for name in ("autoscaler", "keda", "adapter", "monitor")
    )
    (metric,), (trigger,) = scaler["spec"]["metrics"], keda["spec"]["triggers"]
    (rule,) = yaml.safe_load(rules_of["data"]["config.yaml"])["rules"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == rule["seriesQuery"].split("{")[0].replace(":", "_")
    kinds = {f"quire:{family.name}": family.kind for family in FAMILIES}
    for query in (rule["seriesQuery"], trigger["metadata"]["query"]):
        assert [kinds[name] for name in re.findall(r"quire:\w+", query)] == ["gauge"]
    assert float(metric["pods"]["target"]["averageValue"].removesuffix("m")) == 1000 * float(
        trigger["metadata"]["threshold"]
    )
    assert scaler["spec"]["scaleTargetRef"] == keda["spec"]["scaleTargetRef"]
    assert scaler["spec"]["maxReplicas"] == keda["spec"]["maxReplicaCount"]
    assert scaler["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    engine = objects((DEPLOY / "kubernetes" / "engine" / "engine.yaml").read_text())
    (pod,), (endpoint,) = pods(engine), monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod["spec"]["containers"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    read = {tuple(one["valueFrom"]["secretKeyRef"][word] for word in ("name", "key")) for one in container["env"][3:]}
    assert tuple(endpoint["authorization"]["credentials"][word] for word in ("name", "key")) in read


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image(path: Path) -> None:
    """Its own command and those of its comment are read; what it copies is in the project and not ignored."""
    text = path.read_text()
    steps = re.findall(r"^(\w+) ((?:.*\\\n)*.*)$", text, re.M)
    one = {name: rest for name, rest in steps}
    assert json.loads(one["ENTRYPOINT"]) == ["quire"] and refusal(json.loads(one["CMD"])) == ""
    run = shlex.split("".join(line.strip("# \\") + " " for line in text.splitlines() if line.startswith("#    ")))
    command = run[len(run) - run[::-1].index(f"quire:{path.suffix[1:]}") :]
    assert command[0] == "serve" and refusal(command) == ""
    copied = [word for name, rest in steps if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    kept = (rules.ROOT / ".dockerignore").read_text().splitlines()
    assert all(word == "." or (f"!{word}" in kept and (rules.ROOT / word).is_file()) for word in copied)
    assert all((rules.ROOT / line[1:]).exists() for line in kept if line.startswith("!"))


def test_the_unit_of_systemd(tmp_path: Path) -> None:
    """It starts again after faults alone, and gives running requests their time. Its variables are options."""
    text = UNIT.read_text()
    given = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    (words,) = quire_commands(given["ExecStart"].replace("/opt/quire/bin/", ""))
    assert refusal(words) == "" and "--" not in "".join(words), "a flag would beat its variable in quire.env"
    (seconds,) = re.findall(rf"{variable('shutdown_timeout')}=(\d+)", text)
    assert int(given["TimeoutStopSec"]) > int(seconds)
    assert given["Restart"] == "on-failure" and given["RestartForceExitStatus"] == "SIGHUP"  # what a reload sends
    assert {int(code) for code in given["RestartPreventExitStatus"].split()} == {MISUSED, REFUSED, NO_MEMORY}
    options = {variable(name) for name in server_names()} | {CACHE_DIR}
    assert {*re.findall(r"QUIRE_\w+(?==)", text.partition("[Service]")[2] + FILES.read_text())} - {
        "QUIRE_MODEL"
    } <= options
    if shutil.which("systemd-analyze"):
        unit, files = tmp_path / UNIT.name, tmp_path / f"{UNIT.name}.d" / FILES.name
        files.parent.mkdir()
        files.write_text(FILES.read_text())
        unit.write_text(text.replace("/opt/quire/bin/quire", "/bin/true"))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_alerts_are_those_of_the_page_about_metrics_that_there_are() -> None:
    """Each rule asks for series and labels of the registries, and each metric of the tables has a rule."""
    labels = {
        f"{prefix}:{family.name}{SERIES[family.kind.split()[0]]}": {*family.kind.split()[1:], "le"}
        for prefix, families in (("quire", FAMILIES), (router_metrics.PREFIX, router_metrics.FAMILIES))
        for family in families
    }
    asked: set[str] = set()
    for rule in (rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]):
        found = re.findall(r"(quire\w*:\w+)(?:\{(\w+))?", rule["expr"])
        assert found or rule["expr"].startswith("up{"), rule["alert"]
        assert all(name in labels and (not label or label in labels[name]) for name, label in found), rule["alert"]
        known = {"job", "instance"}.union(*(labels[name] for name, _ in found))
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= known and {"severity"} == rule["labels"].keys(), rule["alert"]
        asked |= {name for name, _ in found}
    page = (rules.ROOT / "docs" / "operating.md").read_text()
    tabled = {
        f"{prefix}:{name}"
        for prefix, rows in re.findall(r"^\| metric \(`(\w+):\.\.\.`\).*\n\|---.*\n((?:\|.*\n)+)", page, re.M)
        for cell in re.findall(r"^\| ([^|]+) \|", rows, re.M)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert len(tabled) > 12 and tabled <= asked & labels.keys(), "series as they are in /metrics, each in a rule"
    if shutil.which("promtool"):
        subprocess.run(["promtool", "check", "rules", ALERTS], check=True)


def test_reasons_and_causes_of_the_page_are_those_that_are_0_from_the_start() -> None:
    page = (rules.ROOT / "docs" / "operating.md").read_text().partition("### Reasons and causes")[2].partition("###")[0]
    known = {family.name: {word for (word,) in family.zeros()} for family in FAMILIES if len(family.kind.split()) == 2}
    for label, name in (("reason", "admission_rejections"), ("cause", "request_aborts")):
        (rows,) = re.findall(rf"^\| {label} \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.M)
        cells = re.findall(r"^\| ([^|]+) \|", rows, re.M)
        assert {word for cell in cells for word in re.findall(r"`(\w+)`", cell)} == known[name], name
    assert {reason for _, reason in REFUSALS} < known["admission_rejections"]


def test_the_page_says_of_each_file_whether_it_ran() -> None:
    page = (rules.ROOT / "docs" / "deploying.md").read_text()
    said = dict(re.findall(r"^\| \[`deploy/([^`]+)`\]\([^)]+\) \| [^|]+ \| ((?:not )?run\b[^|]*) \|$", page, re.M))
    files = {
        path.relative_to(DEPLOY).as_posix()
        for path in (*DOCKERFILES, UNIT, FILES, *SETS, KEYS, *PROXIES, DEPLOY / "grafana", ALERTS, UPDATE)
    }
    assert said.keys() == files
    assert {path.relative_to(DEPLOY).parts[:2] for path in MANIFESTS} == {
        ("kubernetes", folder.name) for folder in (*SETS, KEYS)
    }
