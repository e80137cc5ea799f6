"""An application of Ray Serve: one deployment per model, and one that clients see, which chooses the replicas.

    serve run deploy/ray_serve.yaml

`deploy/ray_serve.yaml` is an example of its configuration, docs/deployment.md describes it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from qcompile.deploy.exchange import Asked, Head, Wanted, respond
from qcompile.deploy.front import Front
from qcompile.deploy.settings import ApplicationSettings, ModelSettings, settings_of
from qcompile.errors import BusyError, ResourceError
from qcompile.runtime.server.access import as_bytes
from qcompile.runtime.server.replicas.forwarding import LOST, LostError

_TEXT_SECONDS = 5.0
"""How long replicas may take to tell how they are."""
_MOST_OPEN = 4096
"""Requests at once in a process that chooses replicas."""
_BESIDE = 64
"""Requests that a replica takes beside those that run and wait: short ones, and those that it refuses itself."""
_HEALTH_SECONDS = 5.0
_DRAIN_POLL_SECONDS = 0.5
_LAST_SECONDS = 5.0
"""How much longer than its open answers a process may take to end before it is killed."""


class ModelReplica:
    """A replica: the model, its engine, and the application that `qcompile serve` runs for it."""

    def __init__(self, settings: ModelSettings, keys: Sequence[str]) -> None:
        from qcompile.cli.serving import served_options
        from qcompile.runtime.chat import chat_template
        from qcompile.runtime.server import app
        from qcompile.runtime.server.service import Service

        serving, loading = settings.given
        self._open = ExitStack()
        llm = self._open.enter_context(loading.load(settings.artifact, max_batch=serving.max_batch))
        template = chat_template(settings.artifact, llm.manifest["files"])
        served = app.Served(llm, str(serving.name), template, keys_of(keys), **served_options(serving))
        self._service = Service(llm, served.max_waiting)
        self._open.callback(self._service.close)
        self._open.enter_context(app.python_of_a_server())
        self._app = app.create_app(served, self._service)
        self._name = serve.get_replica_context().replica_tag

    async def answer(self, asked: Asked, wanted: Wanted) -> AsyncGenerator[str | Head | bytes, None]:
        """This replica's name, then its response. wanted: for the router alone."""
        yield self._name
        async for item in respond(self._app, asked):
            yield item

    async def text(self, path: str) -> tuple[str, str] | None:
        """This replica's name, and what it has at a path; None if the response is an error."""
        items = [item async for item in respond(self._app, Asked("GET", path.encode()))]
        head, content = items[0], b"".join(item for item in items if isinstance(item, bytes))
        return (self._name, content.decode()) if isinstance(head, Head) and head.status == 200 else None

    def check_health(self) -> None:
        """Raise ResourceError if the engine has ended; then this replica is replaced. Ray Serve calls it."""
        self._service.check()

    def __del__(self) -> None:
        """End the engine: Ray Serve deletes the replica when its open answers have ended."""
        if stack := self.__dict__.get("_open"):
            stack.close()


class Replicas:
    """The replicas of one model, by the handle of their deployment: a `front.ServedModel`."""

    def __init__(self, handle: DeploymentHandle, settings: ModelSettings, keys: Sequence[str]) -> None:
        self._handle = handle
        self._answering = handle.options(method_name="answer", stream=True)
        self.names: Sequence[str] = settings.names
        self.keys: Sequence[bytes] = as_bytes(keys_of(keys))
        self.isolate_keys = settings.given[0].isolate_keys

    async def answer(self, asked: Asked, wanted: Wanted) -> AsyncGenerator[str | Head | bytes, None]:
        """The response of a replica. A request that a replica has not taken is Ray's to send to another."""
        response = self._answering.remote(asked, wanted)
        ended = False
        try:
            async for item in response:
                yield item
            ended = True
        except RayActorError as error:
            ended = True
            raise LostError(LOST) from error
        except BackPressureError as error:
            raise BusyError("too many requests wait already: try again later") from error
        except DeploymentUnavailableError as error:
            raise ResourceError("no process of the model answers now: try again later") from error
        finally:
            if not ended:
                response.cancel()

    async def texts(self, path: str) -> Mapping[str, str]:
        """What each replica that answers has at a path; nothing if one of them takes too long."""
        try:
            asked = self._handle.broadcast("text", path)
            answers = await asked.results_async(timeout_s=_TEXT_SECONDS, return_exceptions=True)
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            return {}
        return dict(one for one in answers if isinstance(one, tuple))


def keys_of(given: Sequence[str]) -> list[str]:
    """The API keys: those of the configuration, or else the one in QCOMPILE_API_KEY."""
    return [*given] or [key for key in [os.environ.get("QCOMPILE_API_KEY", "")] if key]


def app(args: dict[str, Any]) -> serve.Application:
    """The application of a configuration file. args: fields of `ApplicationSettings`.

    Raises UsageError, ArtifactError.
    """
    settings = settings_of(args)
    models = [_deployment(model, settings.api_keys) for model in settings.models]
    front = serve.deployment(serve.ingress(_front(settings))()).options(
        name="front",
        num_replicas=settings.fronts,
        max_ongoing_requests=_MOST_OPEN,
        graceful_shutdown_timeout_s=_LAST_SECONDS + max(model.given[0].drain_seconds for model in settings.models),
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(*models)


def _deployment(settings: ModelSettings, keys: Sequence[str]) -> serve.Application:
    """The replicas of a model."""
    serving, _ = settings.given
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.autoscaling is not None:
        count = {"autoscaling_config": {"target_ongoing_requests": serving.max_batch} | settings.autoscaling}
    deployment = serve.deployment(ModelReplica).options(
        name=settings.names[0],
        max_ongoing_requests=serving.max_batch + serving.max_waiting + _BESIDE,
        graceful_shutdown_timeout_s=serving.drain_seconds + _LAST_SECONDS,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus, "resources": settings.resources},
        request_router_config=RequestRouterConfig(request_router_class="qcompile.deploy.prefix_router.PrefixRouter"),
        **count,
    )
    return deployment.bind(settings, keys)


def _front(settings: ApplicationSettings) -> Callable[[], FastAPI]:
    """What makes the application that clients see, in the process that runs it."""

    def build() -> FastAPI:
        own = serve.get_replica_context().app_name
        models = [
            Replicas(serve.get_deployment_handle(model.names[0], own), model, settings.api_keys)
            for model in settings.models
        ]
        return Front(models, max(model.most_bytes for model in settings.models)).app()

    return build
