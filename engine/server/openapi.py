"""The OpenAPI page. Bodies are read by `body.py`, not by FastAPI, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one server-sent event whose data is a `model` or, at the end, an error."""
    shapes = [{"$ref": REF.format(model=name)} for name in (model.__name__, "ErrorResponse")]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": shapes}}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def install_openapi(app: FastAPI, models: list[type[BaseModel]], needs_key: bool) -> None:
    """models: those that no route of FastAPI's own shows."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, schemas = models_json_schema([(m, "validation") for m in models], ref_template=REF)
            page["components"]["schemas"] |= schemas["$defs"]
            _drop_default_refusals(page)
            if needs_key:
                _ask_for_key(page)
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = openapi


def _drop_default_refusals(page: dict[str, Any]) -> None:
    """FastAPI announces a 422 wherever a route has a parameter; this server answers 400 instead."""
    for operations in page["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)


def _ask_for_key(page: dict[str, Any]) -> None:
    page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    page["security"] = [{"key": []}]
    page["paths"]["/health"]["get"]["security"] = []
