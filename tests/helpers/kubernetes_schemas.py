"""The operators' own schemas of MPIJobs, TrainJobs and TrainingRuntimes, applied as the API server does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "unit" / "submit" / "schemas"


def strict(schema: Any) -> Any:
    """Return the schema with unknown fields rejected, as the API server does under strict validation."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    out = {k: strict(v) for k, v in schema.items() if not k.startswith("x-") and k != "format"}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not open_ended:
        out["additionalProperties"] = False
    return out


def problems(document: dict[str, Any]) -> list[str]:
    """Return the violations of a document's operator schema. Unknown fields are violations too."""
    version = document["apiVersion"].partition("/")[2]
    with gzip.open(SCHEMAS / f"{document['kind']}-{version}.json.gz", "rt") as file:
        schema = json.load(file)
    if document["kind"] != "TrainingRuntime":  # a CRD only declares that metadata is an object
        schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    errors = jsonschema.Draft202012Validator(strict(schema)).iter_errors(document)
    return ["/".join(map(str, error.path)) + ": " + error.message[:200] for error in errors]
