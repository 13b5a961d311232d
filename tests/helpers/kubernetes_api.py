"""A server with just enough of the Kubernetes API for kubectl to create, get, delete and show logs.

It stores what it receives without checking it. Another test validates against the operators' schemas.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = {
    "kubeflow.org/v2beta1": {"mpijobs": "MPIJob"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
}
VERBS = ["create", "delete", "get", "list", "watch"]


class Api:
    """The server. Keeps `objects` by (resource, namespace, name), and pods' `output` by pod name."""

    def __init__(self, kinds: dict[str, dict[str, str]]) -> None:
        self.kinds = kinds
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.output: dict[str, str] = {}
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, method: str) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                status, body = api.answer(method, self.path, self.rfile.read(length))
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header(
                    "Content-Type", "text/plain" if isinstance(body, str) else "application/json"
                )
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.answer("GET")

            def do_POST(self) -> None:
                self.answer("POST")

            def do_DELETE(self) -> None:
                self.answer("DELETE")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def config(self, directory: Path) -> Path:
        """Write a kubectl configuration for this server, with the namespace `lab`."""
        port = self.server.server_address[1]
        text = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "lab"}}],
            "users": [{"name": "me", "user": {}}],
        }  # fmt: skip
        path = directory / "kubeconfig"
        path.write_text(json.dumps(text))
        return path

    def add_pod(self, name: str, labels: dict[str, str], status: dict[str, Any], output: str = "") -> None:
        self.objects["pods", "lab", name] = {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "lab", "labels": labels},
            "spec": {"containers": [{"name": "main"}]}, "status": status,
        }  # fmt: skip
        self.output[name] = output

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        url = urlsplit(path)
        words = url.path.strip("/").split("/")
        if url.path == "/version":
            return 200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if url.path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if url.path == "/apis":
            return 200, {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(name) for name in self.kinds],
            }
        if url.path == "/api/v1":
            pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": VERBS}
            log = {
                "name": "pods/log",
                "singularName": "",
                "namespaced": True,
                "kind": "Pod",
                "verbs": ["get"],
            }
            return 200, {"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods, log]}
        if words[0] == "apis" and len(words) == 3 and "/".join(words[1:]) in self.kinds:
            group = "/".join(words[1:])
            resources = [
                {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
                for name, kind in self.kinds[group].items()
            ]
            return 200, {"kind": "APIResourceList", "groupVersion": group, "resources": resources}
        if url.path == "/openapi/v2":
            return 200, ""  # an empty document in the format that kubectl requests
        if url.path == "/openapi/v3":
            return 200, {
                "paths": {f"apis/{g}": {"serverRelativeURL": f"/openapi/v3/apis/{g}"} for g in self.kinds}
            }
        if words[:2] == ["openapi", "v3"]:
            group = "/".join(words[3:])
            return 200, _openapi(group, self.kinds[group])
        if "namespaces" in words[:-2]:
            at = words.index("namespaces")
            return self._objects(method, words[at + 1 :], parse_qs(url.query), body)
        return _problem(404, "NotFound", f"the server could not find {path}")

    def _objects(
        self, method: str, words: list[str], query: dict[str, list[str]], body: bytes
    ) -> tuple[int, Any]:
        namespace, resource, *rest = words
        if method == "POST":
            made = json.loads(body)
            name = made["metadata"]["name"]
            if (resource, namespace, name) in self.objects:
                return _problem(409, "AlreadyExists", f'{resource} "{name}" already exists')
            self.objects[resource, namespace, name] = made
            return 201, made
        if not rest:
            wanted = dict(text.split("=") for text in query.get("labelSelector", [""])[0].split(",") if text)
            items = [
                object_
                for (kind, where, _), object_ in self.objects.items()
                if (kind, where) == (resource, namespace)
                and wanted.items() <= object_["metadata"].get("labels", {}).items()
            ]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        key = (resource, namespace, rest[0])
        if key not in self.objects:
            return _problem(404, "NotFound", f'{resource} "{rest[0]}" not found')
        if rest[1:] == ["log"]:
            return 200, self.output[rest[0]]
        if method == "DELETE":
            del self.objects[key]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"uid": "1"}}
        return 200, self.objects[key]


def _group(name: str) -> dict[str, Any]:
    group, version = name.split("/")
    entry = {"groupVersion": name, "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def _openapi(group: str, kinds: dict[str, str]) -> dict[str, Any]:
    """Describe just enough to tell kubectl that the server validates fields, so that kubectl does not."""
    name, version = group.split("/")
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {
        f"/apis/{group}/namespaces/{{namespace}}/{resource}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {"group": name, "version": version, "kind": kind},
                "parameters": parameters,
            }
        }
        for resource, kind in kinds.items()
    }
    return {"openapi": "3.0.0", "info": {"title": "here", "version": "1"}, "paths": paths}


def _problem(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**status, "reason": reason, "message": message, "code": code}
