"""What an application is told: read as it is meant, or refused with the place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qcompile.deploy.settings import settings_of
from qcompile.errors import UsageError

Build = Callable[[str], Path]
EXAMPLE = Path(__file__).parents[2] / "deploy" / "ray_serve.yaml"


def test_the_example_and_its_options(tiny_artifact: Build) -> None:
    (application,) = yaml.safe_load(EXAMPLE.read_text())["applications"]
    args = application["args"]
    args["models"][0] |= {"artifact": str(tiny_artifact("w4a8"))}
    args["models"][0]["options"] |= {"gamma": 3, "lora": ["style=/adapters/style"], "prefix-caching": False}
    (model,) = settings_of(args).models
    serving, loading = model.given
    assert (serving.max_batch, serving.drain_seconds, serving.name) == (16, 30, "tiny-w4a8")
    assert (loading.threads, loading.gamma, loading.prefix_caching) == (4, "3", False)
    assert (
        model.names == ("tiny-w4a8", "style")
        and model.gpus == 0
        and model.autoscaling
        == {
            "min_replicas": 1,
            "max_replicas": 4,
        }
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"models": []}, "args.models: List should have at least 1 item"),
        ({"model": 1}, "args.models: Field required"),
        ({"models": [{"options": {"port": 1}}]}, "port is not one of a model's here; there are allowed-origin, "),
        ({"models": [{"options": {"prot": 1}}]}, "prot is no option of `qcompile serve`"),
        ({"models": [{"options": {"max-batch": 0}}]}, "args.models.0.options: max-batch: 0 is less than 1"),
        ({"models": [{"options": {"max-batch": "x"}}]}, "max-batch: Input should be a valid integer"),
        ({"models": [{"replicas": 1, "autoscaling": {}}]}, "give replicas or autoscaling, not both"),
        ({"models": [{}, {}]}, "two models or adapters are named tiny-w4a8"),
        ({"models": [{"artifact": "none"}]}, "none: no such artifact directory"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], reason: str, tiny_artifact: Build) -> None:
    for model in wrong.get("models", []):
        model.setdefault("artifact", str(tiny_artifact("w4a8")))
    with pytest.raises(UsageError, match=r"^[^\n]*$") as refused:
        settings_of(wrong)
    assert reason in str(refused.value)
