"""What an operator asks: is it up, what does it serve, how does it do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.responses import Response

from specdec_server import __version__
from specdec_server.http.errors import APIError, AsciiJSONResponse
from specdec_server.metrics.prometheus import EngineCollector

if TYPE_CHECKING:
    from specdec_server.api.service import Service

OPENMETRICS = "application/openmetrics-text"


def health(service: Service) -> Response:
    """200 while the engine runs and its steps end; 503 otherwise."""
    llm, limit = service.llm, service.config.stall_timeout
    if not llm.is_running:
        return APIError(503, "the engine has stopped", code="engine_dead").response()
    if llm.stalled_seconds > limit:
        return APIError(503, f"no step has ended for {llm.stalled_seconds:.0f} s", code="stalled").response()
    return AsciiJSONResponse({"status": "ok"})


def ready(service: Service) -> Response:
    """200 while new requests are welcome; 503 from SIGTERM on."""
    if service.draining:
        return APIError(503, "the server is stopping", code="stopping").response()
    return health(service)


def version() -> dict[str, Any]:
    """Versions of the server and the core."""
    import specdec

    return {"version": __version__, "core": specdec.__version__}


def models(service: Service) -> dict[str, Any]:
    """The served model, once for each of its names."""
    return {"object": "list", "data": [model(service, name) for name in service.names]}


def model(service: Service, name: str) -> dict[str, Any]:
    """One entry of the list of models."""
    config = service.llm.config
    speculative = config.speculative
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "specdec",
        "root": config.model,
        "parent": None,
        "max_model_len": service.llm.max_model_len,
        "speculation": None
        if speculative is None
        else {"method": speculative.method, "num_speculative_tokens": speculative.num_speculative_tokens},
        "verifier": config.verifier,
        "lossless": service.llm.lossless,
    }


class MetricsPage:
    """``/metrics``: the engines', the server's, and those of the Python process."""

    def __init__(self, service: Service) -> None:
        self._engines = CollectorRegistry()
        names = {service.llm.config.model: service.names[0]}
        self._engines.register(EngineCollector(vllm_names=service.config.vllm_metrics, model_names=names))
        self._service = service

    def __call__(self, accept: str) -> Response:
        """The page in OpenMetrics when the client names it, else in Prometheus' text format.

        Names keep their colon: `prometheus_client.exposition.choose_encoder` turns it into an underscore for clients
        that do not ask for other characters, though it is one of those that names always could have.
        """
        registries = (self._engines, self._service.metrics.registry, REGISTRY)
        if OPENMETRICS not in accept:
            return Response(b"".join(map(generate_latest, registries)), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        parts = [openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8) for registry in registries]
        end = b"# EOF\n"  # once, at the end of all
        body = b"".join(part.removesuffix(end) for part in parts) + end
        return Response(body, media_type=f"{OPENMETRICS}; version=1.0.0; charset=utf-8")
