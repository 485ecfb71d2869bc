"""The routes, and their schema at /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from minisgl.server.client import EngineDied
from minisgl.server.errors import ApiError, ErrorBody, error_body, refusal
from minisgl.server.gate import Gate
from minisgl.server.live import as_api_error
from minisgl.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from minisgl.server.replies import ChatBody, ChatReply, CompletionBody, CompletionReply, GenerateBody, GenerateReply
from minisgl.server.service import Service, check_ids

_PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error"}}


class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """All of them: one."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """A prompt as the model sees it."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(TypedDict):
    """What tokens say."""

    prompt: str


class Health(TypedDict):
    """That all is well."""

    status: Literal["ok"]


class _Request(Request):
    async def json(self) -> Any:
        """The body. What is no JSON, though Python takes it (NaN, half a character), is refused."""
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return strict


def make_app(service: Service) -> ASGIApp:
    """The server as an ASGI app."""
    app = FastAPI(title="minisgl", description="An OpenAI-compatible server.", docs_url=None, redoc_url=None)
    app.router.route_class = _Route
    post = partial(app.post, responses=_ERRORS)
    get = partial(app.get, responses=_ERRORS)
    streaming = {"responses": _ERRORS | {200: _STREAM}}

    @app.post("/v1/completions", response_model=CompletionBody, **streaming)  # type: ignore[arg-type]
    async def completions(body: CompletionRequest) -> Response:
        """Continue texts, or token ids."""
        service.engine(body.model)
        usage = body.include_usage
        reply = CompletionReply(service.model, service.words, body.logprobs is not None, usage)
        return service.answer(body, body.prompts(), reply, usage)

    @app.post("/v1/chat/completions", response_model=ChatBody, **streaming)  # type: ignore[arg-type]
    async def chat_completions(body: ChatRequest) -> Response:
        """Answer a chat."""
        service.engine(body.model)
        usage = body.include_usage
        reply = ChatReply(service.model, service.words, bool(body.logprobs), usage)
        return service.answer(body, body.prompts(), reply, usage)

    @app.post("/generate", response_model=GenerateBody, **streaming)  # type: ignore[arg-type]
    async def generate(body: GenerateRequest) -> Response:
        """The engine's own words: token ids come back with the text."""
        service.engine()
        reply = GenerateReply(service.model, service.words, body.logprobs is not None)
        return service.answer(body, [body.prompt], reply, usage=True)

    @post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        """There are none."""
        text = "there are no embeddings here: this server's models write text, see /v1/chat/completions"
        raise ApiError(400, text, code="unsupported_endpoint")

    @get("/v1/models", response_model=ModelList)
    async def models() -> Any:
        """The model that is served."""
        return {"object": "list", "data": [model()]}

    @get("/v1/models/{name:path}", response_model=Model)
    async def one_model(name: str) -> Any:
        """One model."""
        return model(name)

    def model(name: str | None = None) -> dict[str, Any]:
        engine = service.engine(name)
        about = {"id": service.model, "object": "model", "created": service.created, "owned_by": "minisgl"}
        return about | {"max_model_len": engine.max_len}

    @post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest) -> Any:
        """A text's token ids, or a chat's."""
        engine = service.engine(body.model)
        prompt = body.only()
        try:
            ids = await engine.encode(prompt)
        except ValueError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from None
        return {"count": len(ids), "max_model_len": engine.max_len, "tokens": ids}

    @post("/detokenize", response_model=Text)
    async def detokenize(body: DetokenizeRequest) -> Any:
        """The text of token ids."""
        engine = service.engine(body.model)
        check_ids(engine, "tokens", body.tokens)
        return {"prompt": await asyncio.to_thread(engine.tokenizer.decode, body.tokens)}

    @app.head("/health", include_in_schema=False)
    @get("/health", response_model=Health)
    async def health() -> Any:
        """Whether requests are answered: 503 while the model loads, while the server stops, and without an engine."""
        if service.state:
            raise ApiError(503, service.state, code="unavailable", headers={"retry-after": "5"})
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses=_ERRORS | {200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @get("/stats")
    async def stats() -> dict[str, Any]:
        """Work done so far, and what goes on now."""
        return await service.stats()

    @app.get("/trace", include_in_schema=False)  # it never ends, which tools that try all routes cannot know
    async def trace() -> Response:
        """The engine's steps from now on, one event each: see minisgl.engine.trace."""
        return service.watch()

    files = {file.name: file.read_bytes() for file in _PAGE.iterdir() if file.suffix in _TYPES}

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str = "index.html") -> Response:
        if name not in files:
            raise ApiError(404, f"there is no file {name!r} here")
        return Response(files[name], headers=_PAGE_HEADERS, media_type=_TYPES[Path(name).suffix])

    _install_errors(app)
    if service.config.api_key:
        schema = app.openapi()
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    gated: ASGIApp = Gate(app, service.config, service.metrics.errors)
    if service.config.cors_origins:  # outside: what asks for permission has no key
        allowed = list(service.config.cors_origins)
        gated = CORSMiddleware(gated, allowed, allow_methods=["*"], allow_headers=["*"])
    return gated


def _install_errors(app: FastAPI) -> None:
    """All errors have OpenAI's shape."""

    def respond(error: ApiError) -> Response:
        return JSONResponse(error.body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return respond(refusal(error.errors()))

    @app.exception_handler(EngineDied)
    async def died(request: Request, error: EngineDied) -> Response:
        return respond(as_api_error(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return respond(error)
        path = request.url.path[:100]
        text = {404: f"there is no {path} here", 405: f"{path} takes no {request.method}"}
        message = text.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return respond(as_api_error(error))
