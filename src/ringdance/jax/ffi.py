"""XLA calls Python with the addresses of its memory: a handler of its foreign function interface, by ctypes.

The structures are those of ``xla/ffi/api/c_api.h``, which jaxlib brings along. Before anything is registered
that header is read: if a structure has other members than here, ``available()`` is False and nobody
touches memory.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ringdance.jax.memory import at_address

__all__ = ["TARGET", "available", "call"]

TARGET = "ringdance_exchange"

Array = np.ndarray[Any, Any]
Called = Callable[[str, list[Array], list[Array]], None]

_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_METADATA = 1  # XLA_FFI_Extension_Metadata


class Extension(Structure):
    """XLA_FFI_Extension_Base."""

    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)]


class ApiVersion(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", c_void_p), ("major_version", c_int),
        ("minor_version", c_int),
    ]


class Metadata(Structure):
    """XLA_FFI_Metadata."""

    _fields_ = [
        ("struct_size", c_size_t), ("api_version", ApiVersion), ("traits", c_uint32),
        ("state_type_id", c_int64),
    ]


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [("extension_base", Extension), ("metadata", POINTER(Metadata))]


class Api(Structure):
    """XLA_FFI_Api, as far as it is needed."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", c_void_p), ("api_version", ApiVersion),
        ("internal_api", c_void_p), ("XLA_FFI_Error_Create", c_void_p),
    ]


class ErrorCreate(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", c_void_p), ("message", c_char_p), ("errc", c_int),
    ]


class Buffer(Structure):
    """XLA_FFI_Buffer."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", c_void_p), ("dtype", c_int), ("data", c_void_p),
        ("rank", c_int64), ("dims", c_void_p),
    ]


class Buffers(Structure):
    """XLA_FFI_Args; XLA_FFI_Rets is the same."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("args", c_size_t),  # address of the array of pointers to Buffer
    ]


class ByteSpan(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("ptr", c_void_p), ("len", c_size_t)]


class Attributes(Structure):
    """XLA_FFI_Attrs; all of ours are strings."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("names", POINTER(POINTER(ByteSpan))), ("attrs", POINTER(POINTER(ByteSpan))),
    ]


class CallFrame(Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = [
        ("struct_size", c_size_t), ("extension_start", POINTER(Extension)), ("api", POINTER(Api)),
        ("ctx", c_void_p), ("stage", c_int), ("args", Buffers), ("rets", Buffers), ("attrs", Attributes),
        ("future", c_void_p),
    ]


# The structures by their names in the header.
_EXPECTED: dict[str, type[Structure]] = {
    "XLA_FFI_Extension_Base": Extension, "XLA_FFI_Api_Version": ApiVersion, "XLA_FFI_Metadata": Metadata,
    "XLA_FFI_Metadata_Extension": MetadataExtension, "XLA_FFI_Api": Api,
    "XLA_FFI_Error_Create_Args": ErrorCreate, "XLA_FFI_Buffer": Buffer, "XLA_FFI_Args": Buffers,
    "XLA_FFI_Rets": Buffers, "XLA_FFI_ByteSpan": ByteSpan, "XLA_FFI_Attrs": Attributes,
    "XLA_FFI_CallFrame": CallFrame,
}
_LATER_NAMES = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}  # from JAX 0.12 on
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE

_called: list[Called] = []
_keep: list[Any] = []  # the handler's code, for as long as the process lives


def call(function: Called) -> None:
    """Set what the handler calls: with the attribute ``what``, the inputs and the outputs."""
    _called[:] = [function]


def members(header: str, name: str) -> list[str]:
    """Return the names of a structure's members as the header declares them."""
    plain = re.sub(r"//[^\n]*", "", header)
    found = re.search(rf"struct {name} \{{(.*?)\n\}}", plain, re.DOTALL)
    if found is None:
        return []
    declarations = [one.strip() for one in found[1].split(";") if one.strip()]
    return [re.split(r"[\s*(]+", one.rstrip(")"))[-1] for one in declarations]


@functools.cache
def _version() -> tuple[int, int] | None:
    """Return the interface's version if all structures are as here, else None."""
    try:
        header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    except (OSError, AttributeError):
        return None
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    if None in numbers or "XLA_FFI_ExecutionStage_EXECUTE = 3" not in header:
        return None
    for name, structure in _EXPECTED.items():
        ours = [field[0] for field in structure._fields_]
        theirs = members(header, name) or members(header, _LATER_NAMES.get(name, ""))
        if name == "XLA_FFI_Rets":
            ours[-1] = "rets"
        if structure is Api:
            theirs = theirs[: len(ours)]
        if structure is Metadata:  # the last member came after jaxlib 0.7
            ours = ours[: max(len(theirs), 3)]
        if theirs != ours:
            return None
    major, minor = (int(number[1]) for number in numbers if number is not None)
    return (major, minor) if major == 0 else None


@functools.cache
def available() -> bool:
    """Return whether XLA can call us; registers the handler the first time."""
    if _version() is None:
        return False
    _register()
    return True


@functools.cache
def _register() -> None:
    handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))(_handle)
    _keep.append(handler)
    pointer = ctypes.cast(handler, c_void_p)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(pointer.value), platform="cpu", api_version=1)


def _handle(frame: Any) -> int | None:
    """Serve one call of XLA; returns an error object, or None."""
    try:
        found = frame.contents
        extension = found.extension_start
        if extension and extension.contents.type == _METADATA:
            _introduce(ctypes.cast(extension, POINTER(MetadataExtension)).contents.metadata.contents)
            return None
        if found.stage == _EXECUTE:
            _execute(found)
        return None
    except BaseException as error:  # there is nobody above who could catch it
        return _error(frame.contents.api.contents, f"{type(error).__name__}: {error}")


def _introduce(metadata: Any) -> None:
    version = _version()
    assert version is not None
    metadata.api_version.struct_size = ctypes.sizeof(ApiVersion)
    metadata.api_version.major_version, metadata.api_version.minor_version = version
    metadata.traits = 0
    if metadata.struct_size > Metadata.state_type_id.offset:
        metadata.state_type_id = 0


def _error(api: Any, message: str) -> int | None:
    create = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorCreate))(api.XLA_FFI_Error_Create)
    arguments = ErrorCreate(ctypes.sizeof(ErrorCreate), None, message.encode(), _INTERNAL)
    made: int | None = create(ctypes.byref(arguments))
    return made


def _attributes(attributes: Any) -> dict[str, str]:
    return {
        _text(attributes.names[place].contents): _text(attributes.attrs[place].contents)
        for place in range(attributes.size)
    }


def _text(span: Any) -> str:
    return ctypes.string_at(span.ptr, span.len).decode()


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@functools.lru_cache(maxsize=1024)
def _shapes(text: str) -> list[list[tuple[tuple[int, ...], np.dtype[Any]]]]:
    return [[(tuple(shape), _dtype(name)) for shape, name in side] for side in json.loads(text)]


def _addresses(buffers: Any) -> list[int]:
    """Return where the data of these buffers lie."""
    if not buffers.size:
        return []
    # By numbers: ctypes objects for each of hundreds of gradients would take longer than the exchange.
    places = (c_size_t * buffers.size).from_address(buffers.args)
    return [c_size_t.from_address(place + Buffer.data.offset).value for place in places]


# XLA uses the same memory again and again; a view says only where it is.
@functools.lru_cache(maxsize=256)
def _views(
    text: str, addresses_in: tuple[int, ...], addresses_out: tuple[int, ...]
) -> tuple[list[Array], list[Array]]:
    """Return inputs and outputs of the shapes in a text."""
    shapes_in, shapes_out = _shapes(text)
    outputs = [at_address(address, *kind) for address, kind in zip(addresses_out, shapes_out, strict=True)]
    known = dict(zip(addresses_out, outputs, strict=True))
    # Where XLA lends its input as output it has to be one object: so the engine knows it works in place.
    inputs = [
        known[address] if address in known and known[address].nbytes else at_address(address, *kind)
        for address, kind in zip(addresses_in, shapes_in, strict=True)
    ]
    return inputs, outputs


def _execute(frame: Any) -> None:
    """Call the function with views. The first buffer on each side is the token that keeps the order."""
    attributes = _attributes(frame.attrs)
    places = tuple(_addresses(frame.args)[1:]), tuple(_addresses(frame.rets)[1:])
    _called[0](attributes["what"], *_views(attributes["shapes"], *places))
