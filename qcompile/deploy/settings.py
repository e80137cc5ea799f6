"""What an application is told: its models, and for each its replicas and the options of `qcompile serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from typer.models import OptionInfo

from qcompile.artifact.reader import read_manifest
from qcompile.cli.environment import long_name
from qcompile.cli.options import ServedLoading, Serving
from qcompile.errors import UsageError
from qcompile.runtime.server.bodies import most_bytes

_OF_THE_CLUSTER = {
    *("host", "port", "replicas", "request-timeout", "max-connections", "max-connections-per-address"),
    *("api-key", "tensor-parallel-size", "threads", "enable-sleep"),
}
"""Options of `qcompile serve` that the cluster decides, that are fields of `ModelSettings`, or concern one process."""
Given = tuple[Serving, ServedLoading]


class ModelSettings(BaseModel):
    """A model. artifact: its folder, at this path on each machine. name: for clients; by default the folder's.

    replicas: processes that serve the whole model. autoscaling: fields of Ray's AutoscalingConfig, in place of a fixed
    number. cpus: cores that each replica reserves, and threads that it computes with if the artifact is for CPUs.
    tensor_parallel_size: processes that each replica consists of; on GPUs, each has one. resources: further ones that
    a replica needs, as Ray names them. options: those of `qcompile serve` by their long names, without `--`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    artifact: Path
    name: str = ""
    replicas: int = Field(1, ge=1)
    autoscaling: dict[str, Any] | None = None
    cpus: int = Field(1, ge=1)
    tensor_parallel_size: int | None = Field(None, ge=1)
    resources: dict[str, float] = {}
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and {"replicas", "autoscaling"} <= given.keys():
            raise ValueError("give replicas or autoscaling, not both")
        return given

    @field_validator("options")
    @classmethod
    def _of_serve(cls, given: dict[str, Any]) -> dict[str, Any]:
        options(given)
        return given

    @cached_property
    def given(self) -> Given:
        """The options as `qcompile serve` has them, the model's name among them."""
        serving, loading = options(self.options)
        name = self.name or serving.name or self.artifact.resolve().name
        loading = replace(loading, tensor_parallel_size=self.tensor_parallel_size)
        return replace(serving, name=name), loading if self.on_gpus else replace(loading, threads=self.cpus)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then those of its adapters."""
        serving, loading = self.given
        return (str(serving.name), *(loading.arguments()["lora"] or {}))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The artifact's manifest. Raises ArtifactError, UsageError."""
        return read_manifest(self.artifact)

    @property
    def on_gpus(self) -> bool:
        """Whether the artifact is for GPUs."""
        return bool(self.manifest["target"].get("kind", "cpu") != "cpu")

    @property
    def gpus(self) -> int:
        """The GPUs of each replica."""
        return self.tensor_parallel_size or 1 if self.on_gpus else 0

    @property
    def most_bytes(self) -> int:
        """The largest body of a request."""
        return most_bytes(self.manifest["model"]["max_position"])


class ApplicationSettings(BaseModel):
    """An application. api_keys: of which clients must send one; by default those in QCOMPILE_API_KEY, where the
    replicas run. fronts: processes that choose replicas for requests; each has its own view of where prompts are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    models: list[ModelSettings] = Field(min_length=1)
    api_keys: list[str] = []
    fronts: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _names_differ(self) -> ApplicationSettings:
        names = [name for model in self.models for name in model.names]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two models or adapters are named {min(twice)}: give one another name")
        return self


def settings_of(given: Mapping[str, Any]) -> ApplicationSettings:
    """The settings in `args` of a configuration file. Raises UsageError, ArtifactError."""
    try:
        return ApplicationSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"args{'.' if place else ''}{place}: {first['msg'].removeprefix('Value error, ')}") from error


def options(given: Mapping[str, Any]) -> Given:
    """Options of `qcompile serve` by their long names. Raises ValueError."""
    known = _known(Serving) | _known(ServedLoading)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known or name in _OF_THE_CLUSTER:
            why = "is not one of a model's here" if name in known else "is no option of `qcompile serve`"
            raise ValueError(f"{name} {why}; there are {', '.join(sorted(known.keys() - _OF_THE_CLUSTER))}")
        field, hint, option = known[name]
        try:
            values[field] = TypeAdapter(hint, config=ConfigDict(coerce_numbers_to_str=True)).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name}: {error.errors()[0]['msg']}") from error
        if option.min is not None and values[field] is not None and values[field] < option.min:
            raise ValueError(f"{name}: {value} is less than {option.min}")
    serving, loading = (
        {field: values[field] for field in _names(kind) & values.keys()} for kind in (Serving, ServedLoading)
    )
    return Serving(**serving), ServedLoading(**loading)


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def _known(kind: type) -> dict[str, tuple[str, Any, OptionInfo]]:
    """By the long name of each option: its field, type and description."""
    hints = get_type_hints(kind, include_extras=True)
    described = {field: (hint.__origin__, hint.__metadata__[0]) for field, hint in hints.items()}
    return {str(long_name(option)): (field, hint, option) for field, (hint, option) in described.items()}
