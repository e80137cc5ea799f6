"""The files of deploy/ name metrics, options and paths that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from qcompile.runtime.server.metrics import Metrics
from qcompile.runtime.server.replicas.metrics import RouterMetrics
from qcompile.runtime.speculation.explained import GammaFacts

DEPLOY = Path(__file__).parents[1] / "deploy"
YAML = sorted(DEPLOY.rglob("*.y*ml"))


def server_metrics() -> list[str]:
    """The samples of a server's /metrics, a line each."""
    drafting = [GammaFacts(1, 96, 0, 0.5, {1: 0.9, 2: 0.8}, {1: 0.7, 2: 0.6}), GammaFacts(4, 96, 2, 0.5, {2: 1.2}, {})]
    busy = SimpleNamespace(running=0, waiting=0, kv_pages_used_ratio=0.0, asleep=False, drafting=drafting)
    server = Metrics(busy, "m")
    server.responded("/health", 200)
    server._samples.labels("m", "stop").inc()
    return [line for line in server.text().decode().splitlines() if not line.startswith("#")]


def exported() -> set[str]:
    """Names of the samples of /metrics, those of replicas included."""
    router = RouterMetrics("m")
    router.observe(0, True, 0)
    text = router.text({0: "\n".join(server_metrics()) + "\n"}).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_what_auto_knows_is_told_by_number_of_requests() -> None:
    """Where nothing drafts, the gain is that of the best gamma; what was not measured is left out."""
    families = text_string_to_metric_families("\n".join(server_metrics()) + "\n")
    samples = [sample for family in families for sample in family.samples if "draft_g" in sample.name]
    values = {sample.name + sample.labels["batch"]: sample.value for sample in samples}
    gain = "qcompile_draft_gain"
    assert values == {
        "qcompile_draft_gamma1": 0,
        "qcompile_draft_gamma4": 2,
        f"{gain}_expected1": 0.9,
        f"{gain}_expected4": 1.2,
        f"{gain}_measured1": 0.7,
    }


def queries(result: Any) -> Iterator[str]:
    """All expressions of Prometheus in a dashboard or in rules."""
    if isinstance(result, dict):
        for key, value in result.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)
    elif isinstance(result, list):
        for value in result:
            yield from queries(value)


def test_queries_name_metrics_that_are_exported() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/qcompile.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    asked = [*queries(dashboard), *queries(alerts)]
    named = {name for query in asked for name in re.findall(r"qcompile_\w+", query)}
    assert len(asked) >= 20 and len(named) >= 15 and named <= exported()
    assert all(query.count("(") == query.count(")") and query.count("{") == query.count("}") for query in asked)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in dashboard["panels"]}) == len(places)


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_files_are_yaml(path: Path) -> None:
    assert all(yaml.safe_load_all(path.read_text()))


def served_options(arguments: list[str]) -> set[str]:
    """The options of `serve` in a list of arguments."""
    return {argument for argument in arguments if argument.startswith("--")}


def known_options() -> set[str]:
    """Options of `serve`, as docs/cli.md has them, which other tests compare with its help."""
    return set(re.findall(r"`(--[a-z][a-z-]+)", (DEPLOY.parent / "docs/cli.md").read_text()))


def test_options_and_probes_are_those_of_the_server() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", image, re.M)[1])  # type: ignore[index]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    deployment, service, *_ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = [*entry, *compose["services"]["qcompile"]["command"], *container["args"]]
    assert entry[:2] == ["qcompile", "serve"] and served_options(given) <= known_options()
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    assert probes == ["/health"] * 3
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    drain = int(container["args"][container["args"].index("--drain-seconds") + 1])
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain + 5


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for one in services.values() for volume in one.get("volumes", ())]
    own = [DEPLOY / name for name in mounted if name.startswith("./")]
    assert len(own) == 4 and all(path.exists() for path in own)
