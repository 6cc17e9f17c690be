# SPDX-License-Identifier: Apache-2.0
"""The documents say what the code does: keys, flags, metrics, devices, messages, examples and links."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry

from driver import attributes, guardnotes, health, introspect, settings
from driver.claims import decode_claim
from driver.cli import main
from driver.commandline import parse_command_line
from driver.config import Config
from driver.devices import INDIVIDUAL, DeviceModel, build_devices
from driver.errors import ConfigError
from driver.flags import HelpRequest, fold
from driver.individual import build_individual_devices
from driver.metrics import Metrics
from driver.names import ClaimUID
from driver.parameters import parse_parameters
from driver.sandbox.apistatus import FieldErrors
from driver.sandbox.claimrules import ClaimRules
from driver.sandbox.machine import MachineShape, write_machine
from driver.slices import DEVICES_PER_SLICE, DEVICES_PER_SLICE_WITH_LISTS
from driver.smt_layout import smt_layout
from fastcpu import CpuSet, Topology, read_topology

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(DOCS.rglob("*.md"))
TEXTS = {page: page.read_text() for page in PAGES}
CONFIGURATION = TEXTS[DOCS / "configuration.md"]
METRICS = TEXTS[DOCS / "metrics.md"]
DEVICES = TEXTS[DOCS / "devices.md"]
TROUBLESHOOTING = TEXTS[DOCS / "troubleshooting.md"]
OWN = (CONFIGURATION, METRICS, DEVICES, TROUBLESHOOTING)
NOTHING = "–"

Row = dict[str, str]


def tables(text: str) -> list[list[Row]]:
    """Return all tables of a page, each row by the heads of its columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in block.strip().split("\n")
        ]
        head, _, *rows = lines
        assert all(len(row) == len(head) for row in rows), block
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def rows(text: str, *heads: str) -> list[Row]:
    """Return the rows of all tables that begin with these columns."""
    return [row for table in tables(text) for row in table if tuple(table[0])[: len(heads)] == heads]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def span(text: str) -> str:
    [found] = spans(text)
    return found


# Configuration.

DEFAULTS = {fold(name): value for name, value in Config().describe().items()}


def default(name: str) -> str:
    """Return a setting's default as the tables have it."""
    value = DEFAULTS.get(fold(name), "")
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`" if shown else NOTHING


def test_every_key_is_told_with_its_default_and_no_other() -> None:
    told = {span(row["key"]): row["default"] for row in rows(CONFIGURATION, "key", "default")}
    keys = ["apiVersion", *(setting.key for setting in settings.SETTINGS if setting.key)]
    assert told == {key: default(key) for key in keys}


def test_the_values_of_keys_are_those_that_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for row in rows(CONFIGURATION, "key", "default", "values"):
        key, values = span(row["key"]), spans(row["values"])
        if key in ("apiVersion", "cpuDeviceMode", "groupBy", "allocator", "publishNodeAllocatableResourceMapping"):
            for value in values:
                path.write_text(f"{key}: {value}\n" + ("allocator: external\n" if key == "groupBy" else ""))
                settings.load({"config": str(path)})
            path.write_text(f"{key}: nonsense\n")
            expected = " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))
            with pytest.raises(ConfigError, match=f"expected {expected}$"):
                settings.load({"config": str(path)})


def test_every_flag_is_told_with_its_default_and_no_other() -> None:
    told = {span(row["flag"]): row["default"] for row in rows(CONFIGURATION, "flag", "default")}
    deprecated = {span(row["flag"]): span(row["key"]) for row in rows(CONFIGURATION, "flag", "key")}
    known = {f"--{flag.name}": flag for flag in settings.FLAGS}
    keys = {f"--{each.flag.name}": each.key for each in settings.SETTINGS if each.flag and each.key}
    assert deprecated == {flag: key for flag, key in keys.items() if "deprecated" in known[flag].help}
    assert told == {flag: default(flag) for flag in known if flag not in deprecated}


def help_of(*command: str) -> str:
    with pytest.raises(HelpRequest) as request:
        parse_command_line([*command, "--help"])
    return str(request.value)


def test_the_flags_of_the_other_commands_are_told() -> None:
    told: list[str] = []
    for row in rows(CONFIGURATION, "command", "flags"):
        told = told if row["flags"] == "the same" else spans(row["flags"])
        _, *command = span(row["command"]).split()
        own = set(re.findall(r"^  (--[a-z-]+)", help_of(*command), re.MULTILINE))
        assert set(told) == (
            own - {f"--{flag.name}" for flag in settings.FLAGS} if "all above" in row["flags"] else own
        )


def test_no_page_names_a_flag_that_does_not_exist() -> None:
    known = {flag for command in ([], ["gatherinfo"], ["demo"]) for flag in re.findall(r"--[a-z-]+", help_of(*command))}
    named = {flag for text in OWN for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert named <= known | {"--help", "--x"}


def test_the_files_are_where_the_table_says() -> None:
    config = Config()
    told = [Path(span(row["path"])) for row in rows(CONFIGURATION, "path", "what")]
    folder = config.plugin_dir
    assert told == [
        config.dra_socket,
        folder / "claims",
        folder / "instance.lock",
        folder / "start-guard",
        folder / guardnotes.FOLDER,
        folder / "dra-device-metadata",
        config.registration_socket,
        config.cdi_dir,
    ]


# Metrics.


def described(row: Row) -> tuple[str, str, dict[str, list[str]]]:
    labels = {}
    for part in filter(None, row["labels"].split(";")):
        label, _, values = part.partition(":")
        labels[span(label)] = spans(values)
    return span(row["metric"]), row["type"], labels


def test_every_metric_is_told_with_its_type_and_labels_and_no_other() -> None:
    told = [described(row) for row in rows(METRICS, "metric", "type", "labels")]
    assert sorted((name, kind, list(labels)) for name, kind, labels in told) == [
        (metric["name"], metric["type"], metric["labels"]) for metric in introspect.describe_metrics()
    ]


def test_the_values_of_labels_are_those_of_the_series() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    series = {metric.name: metric.samples for metric in registry.collect()}
    for name, _, labels in (described(row) for row in rows(METRICS, "metric", "type", "labels")):
        for label, values in labels.items():
            found = dict.fromkeys(sample.labels[label] for sample in series[name.removesuffix("_total")])
            assert values == list(found) or (label in ("attribute", "condition", "version") and not values)


def test_no_page_names_a_metric_that_does_not_exist() -> None:
    known = {metric["name"] for metric in introspect.describe_metrics()}
    for page, text in TEXTS.items():
        assert set(re.findall(r"dra_cpu_\w+", text)) <= known, page


# Devices.


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    shape = MachineShape(sockets=1, numa_nodes=2, cpus=64, cores_per_l3=4)
    return read_topology(write_machine(tmp_path_factory.mktemp("machine") / "sys", shape))


def model_of(topology: Topology, group_by: str, allocator: str = "external", *, pcie: bool = True) -> DeviceModel:
    reserved = CpuSet([0, 32])
    roots = dict.fromkeys(range(64), ("pci0000:00",)) if pcie else None
    if group_by == INDIVIDUAL:
        return build_individual_devices(topology, reserved=reserved, pcie_roots=roots, node_allocatable_mapping=False)
    return build_devices(
        topology,
        reserved=reserved,
        group_by=group_by,
        allocator=allocator,
        pcie_roots=roots,
        node_allocatable_mapping=False,
    )


@pytest.mark.parametrize("group_by", [*settings.GROUPINGS, INDIVIDUAL])
def test_the_table_of_attributes_is_that_of_the_devices(topology: Topology, group_by: str) -> None:
    column = "individual" if group_by == INDIVIDUAL else f"`{group_by}`"
    told = [
        (name, row["type"])
        for row in rows(DEVICES, "attribute", "type")
        if row[column]
        for name in spans(row["attribute"])[:1]
    ]
    device = model_of(topology, group_by).devices[0]
    assert sorted(told) == sorted((name, next(iter(value))) for name, value in device.attributes.items())
    external = {"dra.cpu/cpuIDs", "dra.cpu/smtLayout"} & set(device.attributes)
    assert set(device.attributes) - set(model_of(topology, group_by, "cpumanager").devices[0].attributes) == external


def test_every_attribute_is_told() -> None:
    told = {name for row in rows(DEVICES, "attribute", "type") for name in spans(row["attribute"])}
    assert told == {value for value in vars(attributes).values() if str(value).startswith(("dra.", "resource."))}


def test_the_device_of_the_example_is_published_so(topology: Topology) -> None:
    [example] = [block for block in yaml_blocks(DEVICES) if "capacity" in block]
    assert example == model_of(topology, "numanode", pcie=False).devices[0].to_api()


def test_the_names_are_those_of_the_devices(topology: Topology) -> None:
    for row in rows(DEVICES, "`groupBy`", "device"):
        group_by = INDIVIDUAL if row["`groupBy`"] == "individual mode" else span(row["`groupBy`"])
        assert model_of(topology, group_by).devices[0].name == span(row["device"])


def test_the_layouts_are_those_of_the_cores() -> None:
    for row in rows(DEVICES, "layout", "cores"):
        members = [[int(cpu) for cpu in core.split("+")] for core in row["cores"].split(", ")]
        core_of = {cpu: number for number, core in enumerate(members) for cpu in core}
        cores = [core_of[cpu] for cpu in range(len(core_of))]
        assert smt_layout(Topology.from_arrays(CpuSet(core_of), cores=cores).cores).strided == span(row["layout"])
    assert str(CpuSet.parse("0-110:1/2")) == ",".join(map(str, range(0, 111, 2)))


def test_the_limits_are_those_of_the_code() -> None:
    text = " ".join(DEVICES.split())
    assert f"at most {DEVICES_PER_SLICE} devices, {DEVICES_PER_SLICE_WITH_LISTS} if any" in text
    assert f"A string attribute holds {attributes.LARGEST_STRING} bytes" in text
    assert f"more than {attributes.LARGEST_VALUE_COUNT} values" in text


# Snippets.


def yaml_texts(text: str) -> list[str]:
    """Return the YAML of a page: in fences, or indented and recognisable."""
    fenced = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"(?:^    .*\n)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return fenced + [block for block in indented if block.startswith(("    apiVersion:", "    # config.yaml"))]


def yaml_blocks(text: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in yaml_texts(text)]


SNIPPETS = [
    pytest.param(block, id=f"{page.name}-{n}")
    for page, text in TEXTS.items()
    for n, block in enumerate(yaml_texts(text))
]


CHART = ROOT / "deploy/helm/dracpu"
EXAMPLES = sorted((DOCS / "examples").glob("*.yaml"))


def example(name: str, kind: str) -> dict[str, Any]:
    """Return the one object of a kind that an example has."""
    documents = yaml.safe_load_all((DOCS / "examples" / name).read_text())
    [found] = [document for document in documents if document["kind"] == kind]
    assert isinstance(found, dict)
    return found


def check_values(given: dict[str, Any]) -> None:
    """Hold values to the chart's schema, which looks at them together with the defaults."""

    def merge(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
        both = {key: merge(values[key], over[key]) for key in over if isinstance(values.get(key), dict)}
        return {**values, **over, **both}

    values = merge(yaml.safe_load((CHART / "values.yaml").read_text()), given)
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))


def check_claim(claim: dict[str, Any]) -> None:
    """Hold a claim to what the API server and the driver want of one."""
    for entry in claim["spec"]["devices"].get("config", []):
        parse_parameters(entry["opaque"]["parameters"])
    errors = FieldErrors()
    rules = ClaimRules()
    rules.prepare(claim, None, "")
    rules.check(claim, None, "", errors)
    assert errors.causes == []


def check_allocation(status: dict[str, Any]) -> None:
    """Hold the status of the example's claim to what the API server and the driver want of one."""
    old = example("scheduled-outside.yaml", "ResourceClaim")
    old["metadata"] = {"namespace": "default", "uid": "5c8756a2-98de-4acf-8639-46fd8cdf914c", **old["metadata"]}
    rules = ClaimRules()
    rules.prepare(old, None, "")
    new = {**copy.deepcopy(old), "status": json.loads(json.dumps(status, default=str))}
    errors = FieldErrors()
    rules.check(new, old, "status", errors)
    assert errors.causes == []
    claim = decode_claim(new, ClaimUID(old["metadata"]["uid"]))
    assert [result.request for result in claim.results] == ["cpus"]
    assert {pod["name"] for pod in status["reservedFor"]} == {
        example("scheduled-outside.yaml", "Pod")["metadata"]["name"]
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_claims_of_the_examples_are_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == "ResourceClaim":
            check_claim(document)


@pytest.mark.parametrize("block", SNIPPETS)
def test_every_snippet_is_what_it_is_taken_for(block: str, tmp_path: Path) -> None:
    document = yaml.safe_load(block)
    if "# values.yaml" in block:
        check_values(document)
    elif "# allocation.json" in block:
        check_allocation(document["status"])
    elif "# config.yaml" in block:
        (tmp_path / "config.yaml").write_text(block)
        config = settings.load({"config": str(tmp_path / "config.yaml")})
        assert config.describe() != Config().describe()
    elif document.get("kind") == "ResourceClaim":
        check_claim(document)
    elif document.get("kind") == "Pod":
        assert document == example("exact-cpus.yaml", "Pod")
    elif document.get("kind") == "DeviceClass":
        for entry in document["spec"]["config"]:
            parse_parameters(entry["opaque"]["parameters"])
    elif "cpuConfig" in document:
        parse_parameters(document)
    elif document.get("kind") == "KubeletConfiguration":
        assert document["cpuManagerPolicy"] == "none"
    elif document.get("kind") == "Binding":
        assert document["metadata"]["name"] == example("scheduled-outside.yaml", "Pod")["metadata"]["name"]
    elif list(document) == ["metadata"]:
        assert all(isinstance(value, str) for value in document["metadata"]["annotations"].values())
    else:
        assert "attributes" in document, "a snippet that no test looks at"


def test_the_error_of_the_example_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("groupby: socket\n")
    monkeypatch.chdir(tmp_path)
    [(command, output)] = re.findall(r"```console\n\$ dracpu (.*)\n(dracpu: .*\n)", CONFIGURATION)
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err == output


@pytest.mark.parametrize("text", OWN)
def test_commands_are_understood(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("groupBy: socket\n")
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"(?:^\$ |`)dracpu( [a-z-][^`\n]*)?[`\n]", text, re.MULTILINE):
        if "--help" not in command:
            parse_command_line(shlex.split(command))


def shown_commands(text: str) -> list[str]:
    """Return all commands that a page shows with a prompt, each on one line."""
    blocks = re.findall(r"```console\n(.*?)```", text.replace("\\\n", ""), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_commands_name_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z0-9-]+)`", TEXTS[page]):
        assert target in targets
    for path in re.findall(r"`((?:src|tests|deploy|docs)/[\w./-]+)`", TEXTS[page]):
        assert (ROOT / path).exists(), path
    for command in shown_commands(TEXTS[page]):
        for word in shlex.split(command):
            if re.match(r"(deploy|docs|tests)/", word):
                assert (ROOT / word).exists(), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_values_in_commands_are_those_of_the_chart(page: Path) -> None:
    for command in shown_commands(TEXTS[page]):
        words = shlex.split(command)
        for flag, setting in pairwise(words):
            if flag == "--set" and "|| true" not in command:
                key, _, text = setting.partition("=")
                value: Any = yaml.safe_load(text) if text in ("true", "false") else text
                for part in reversed(key.split(".")):
                    value = {part: value}
                check_values(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fences_name_their_language(page: Path) -> None:
    opening = re.findall(r"^ *```(.*)$", TEXTS[page], re.MULTILINE)[::2]
    assert set(opening) <= {"console", "ini", "python", "sh", "text", "toml", "yaml"}


# The first page.

README = TEXTS[ROOT / "README.md"]
INSTALLATION = TEXTS[DOCS / "installation.md"]
BENCHMARKS = TEXTS[DOCS / "benchmarks.md"]


def test_the_claim_and_the_pod_of_the_first_page_are_the_example() -> None:
    claim, pod = yaml_blocks(README)
    assert claim == example("exact-cpus.yaml", "ResourceClaim")
    assert pod == example("exact-cpus.yaml", "Pod")


def test_the_cpus_of_the_pod_are_those_that_the_installation_shows() -> None:
    """The tests in a cluster run the commands of the installation and compare what they print."""
    [shown] = re.findall(r"^\$ kubectl exec pinned .*\nCpus_allowed_list:.*\n", README, re.MULTILINE)
    assert shown in INSTALLATION
    [entry] = example("exact-cpus.yaml", "ResourceClaim")["spec"]["devices"]["config"]
    assert shown.split()[-1] == entry["opaque"]["parameters"]["cpuConfig"]["cpuset"]


def test_the_versions_are_those_of_the_installation_and_of_the_tests() -> None:
    told = rows(README, "", "needed", "tried")
    assert told
    assert [row for row in told if row not in rows(INSTALLATION, "", "needed", "tried")] == []
    tried = {row[""]: re.findall(r"\d+(?:\.\d+)+", row["tried"]) for row in told}
    pins = {
        "Kubernetes": [("cluster/kubernetes", "k8s.io/kubernetes")],
        "container runtime": [
            (f"containerd-{line}", "github.com/containerd/containerd/v2") for line in ("2.4", "2.3", "2.2", "2.1")
        ],
    }
    for what, modules in pins.items():
        texts = [((ROOT / "tests/e2e" / folder / "go.mod").read_text(), module) for folder, module in modules]
        assert tried[what] == [
            version for text, module in texts for version in re.findall(rf"^\s*{module} v([\d.]+)", text, re.MULTILINE)
        ]


def benchmark(job: str, size: str) -> Row:
    """Return the row of all figures for a job, which is named "section: row"."""
    section = None
    for row in rows(BENCHMARKS, "", "size", "ours"):
        if row[""].startswith("**"):
            section = row[""].strip("*")
        elif f"{section}: {row['']}" == job and row["size"] == size:
            return row
    raise AssertionError(f"{job}, {size} is not in the benchmarks")


def test_the_figures_are_those_of_the_benchmarks() -> None:
    told = rows(README, "", "CPUs", "ours", "beside")
    assert len(told) == 3
    for row in told:
        measured = benchmark(row[""], row["CPUs"])
        assert row["ours"] == measured["ours"]
        beside = {f"{name} {text}" for name, text in measured.items()} | {measured["other"]}
        assert set(row["beside"].split(", ")) <= beside


# Links.


def anchors(text: str) -> set[str]:
    """Return what a page's headings are called in links."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(linked.read_text()), target


# Messages.

_DRIVER = ROOT / "src/driver"
TREES = {
    path: ast.parse(path.read_text())
    for path in sorted(_DRIVER.rglob("*.py"))
    if not {"sandbox", "apis"} & set(path.relative_to(_DRIVER).parts)
}


CONSTANTS = {
    node.target.id: node.value.value
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Constant)
}


def squeezed(text: str) -> str:
    """Return a text with what varies, however much of it, as one `…`."""
    return re.sub(r"…(?: ?…)+", "…", " ".join(text.split()))


def template(node: ast.expr) -> str | None:
    """Return what an expression says, with `…` for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return squeezed(re.sub(r"\{\}", "…", node.value))
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(part.value)
        elif isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
            parts.append(str(CONSTANTS.get(part.value.id, "…")))
        else:
            parts.append("…")
    return squeezed("".join(parts))


def messages_of_the_code() -> set[str]:
    found = set()
    for tree in TREES.values():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.expr) and id(node) not in docstrings and (text := template(node)):
                found.add(text)
    return found


CODE = messages_of_the_code()
TOLD = [
    squeezed(message)
    for table in tables(TROUBLESHOOTING)
    for row in table
    if row.get("message", "").startswith("`")
    for message in [span(row["message"])]
]
LOGGED = [
    text
    for text in spans(re.sub(r"^\|[^\n]*|```.*?```", "", TROUBLESHOOTING, flags=re.MULTILINE | re.DOTALL))
    if re.fullmatch(r"[a-z, ]{12,}", text)
]


def test_every_message_that_is_told_is_one_of_the_code() -> None:
    assert len(TOLD) > 100
    assert len(LOGGED) > 5
    assert [message for message in TOLD + LOGGED if not any(message in text for text in CODE)] == []


def refusals() -> Iterator[str]:
    """Yield what claims and containers are refused with, as far as the code has it in one place."""
    ours = ("allocators", "claimfiles", "claims", "cpumanager", "decisions", "individual", "json_values", "kubelet")
    for path, tree in TREES.items():
        if path.stem not in (*ours, "names", "parameters", "policies", "prepare"):
            continue
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            if isinstance(node.exc.func, ast.Name) and node.exc.func.id in (
                "ClaimError",
                "ClaimPendingError",
                "_Fault",
            ):
                text = template(node.exc.args[-1])
                # What only says where something is wrong has the rest from another place.
                if text and len(re.sub(r"\W|request|device|cpuset", "", text)) > 15:
                    yield text


def test_every_refusal_is_told() -> None:
    found = set(refusals())
    assert len(found) > 40
    assert [text for text in sorted(found) if not any(message in text for message in TOLD)] == []


def test_every_condition_of_being_ready_is_told() -> None:
    told = {text for row in rows(TROUBLESHOOTING, "condition", "message") for text in spans(row["condition"])}
    conditions = {health.STARTED, health.REGISTERED, health.SLICES, health.INSTANCE, health.RUNTIME, health.START_GUARD}
    assert told == conditions


def values_of(metric: str) -> list[str]:
    [(_, _, labels)] = [found for row in rows(METRICS, "metric") if (found := described(row))[0] == metric]
    [values] = labels.values()
    return values


@pytest.mark.parametrize(
    ("metric", "heads"),
    [
        ("dra_cpu_nri_refused_containers_total", ("reason", "message")),
        ("dra_cpu_broken_files_total", ("kind", "what happens")),
        ("dra_cpu_record_mismatches_total", ("reason", "cause")),
    ],
)
def test_every_value_of_a_label_is_explained(metric: str, heads: tuple[str, str]) -> None:
    told = [text for row in rows(TROUBLESHOOTING, *heads) for text in spans(row[heads[0]])]
    assert sorted(told) == sorted(values_of(metric))
