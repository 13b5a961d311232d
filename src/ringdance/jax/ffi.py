"""Handlers for XLA's foreign function interface, written with ctypes.

XLA passes the addresses of its buffers to a handler, so that exchanges can work on them in place. It declares
the structures of the interface in ``xla/ffi/api/c_api.h``, which is part of jaxlib. This module reads the
header before it registers a handler. If the members of a structure differ from the declaration in this
module, ``available()`` returns False and no memory is accessed.
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
import ml_dtypes  # noqa: F401  # Registers the name bfloat16 with NumPy.
import numpy as np

from ringdance.training.collectives import array_at

Array = np.ndarray[Any, Any]
Addresses = tuple[int, ...]
# Takes the attributes, the addresses of inputs and outputs, and a function that returns the GPU's stream.
Handler = Callable[[dict[str, str], Addresses, Addresses, Callable[[], int]], None]

_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE

_layout: dict[str, Any] = {}  # The structures below, keyed by their names in the header.
_HEAD = {"struct_size": c_size_t, "extension_start": c_void_p}  # Most structures start with these members.


def _structure(name: str, **members: Any) -> Any:
    structure = _layout[f"XLA_FFI_{name}"] = type(name, (Structure,), {"_fields_": list(members.items())})
    return structure


Extension = _structure("Extension_Base", struct_size=c_size_t, type=c_int, next=c_void_p)
ApiVersion = _structure("Api_Version", **_HEAD, major_version=c_int, minor_version=c_int)
Metadata = _structure(
    "Metadata", struct_size=c_size_t, api_version=ApiVersion, traits=c_uint32, state_type_id=c_int64
)
MetadataExtension = _structure("Metadata_Extension", extension_base=Extension, metadata=POINTER(Metadata))
# Only the leading members are declared. The others are not needed.
Api = _structure("Api", **_HEAD, api_version=ApiVersion, internal_api=c_void_p, XLA_FFI_Error_Create=c_void_p)
StreamGet = _structure("Stream_Get_Args", **_HEAD, ctx=c_void_p, stream=c_void_p)
ErrorCreate = _structure("Error_Create_Args", **_HEAD, message=c_char_p, errc=c_int)
Buffer = _structure("Buffer", **_HEAD, dtype=c_int, data=c_void_p, rank=c_int64, dims=c_void_p)
# The last member of Args and Rets is the address of an array of pointers to Buffer.
Arguments = _structure("Args", **_HEAD, size=c_int64, types=c_void_p, args=c_size_t)
Results = _structure("Rets", **_HEAD, size=c_int64, types=c_void_p, rets=c_size_t)
ByteSpan = _structure("ByteSpan", ptr=c_void_p, len=c_size_t)
_Spans = POINTER(POINTER(ByteSpan))  # All attributes used here are strings.
Attributes = _structure("Attrs", **_HEAD, size=c_int64, types=c_void_p, names=_Spans, attrs=_Spans)
CallFrame = _structure(
    "CallFrame", struct_size=c_size_t, extension_start=POINTER(Extension), api=POINTER(Api), ctx=c_void_p,
    stage=c_int, args=Arguments, rets=Results, attrs=Attributes, future=c_void_p,
)
_LATER_NAMES = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}  # Renamed in JAX 0.12.

_alive: list[Any] = []  # References that keep the registered functions alive for the life of the process.


def members(header: str, name: str) -> list[str]:
    """Return the names of a structure's members, as declared in the text of a header file."""
    plain = re.sub(r"//[^\n]*", "", header)
    match = re.search(rf"struct {name} \{{(.*?)\n\}}", plain, re.DOTALL)
    if match is None:
        return []
    declarations = [declaration.strip() for declaration in match[1].split(";") if declaration.strip()]
    return [re.split(r"[\s*(]+", declaration.rstrip(")"))[-1] for declaration in declarations]


@functools.cache
def _header() -> str:
    return Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()


@functools.cache
def _version() -> tuple[int, int] | None:
    """Return the interface's (major, minor) version, or None if a structure differs from its declaration."""
    try:
        header = _header()
    except (OSError, AttributeError):
        return None
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    if None in numbers or f"XLA_FFI_ExecutionStage_EXECUTE = {_EXECUTE}" not in header:
        return None
    for name, structure in _layout.items():
        ours = [field[0] for field in structure._fields_]
        theirs = members(header, name) or members(header, _LATER_NAMES.get(name, ""))
        if structure is Api:
            theirs = theirs[: len(ours)]
        if structure is Metadata:  # jaxlib 0.7 lacks the last member.
            ours = ours[: max(len(theirs), 3)]
        if theirs != ours:
            return None
    major, minor = (int(number[1]) for number in numbers if number is not None)
    return (major, minor) if major == 0 else None


def available() -> bool:
    """Return True if XLA can call Python."""
    return _version() is not None


def register(target: str, handler: Handler, platform: str) -> None:
    """Let programs call ``handler`` by the name ``target``. Requires ``available()``."""
    function = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))(functools.partial(_handle, handler))
    _alive.append(function)
    pointer = ctypes.cast(function, c_void_p)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(pointer.value), platform=platform, api_version=1)


def _handle(handler: Handler, frame: Any) -> int | None:
    """Handle a call from XLA. Returns the address of an error object, or None on success."""
    try:
        call = frame.contents
        extension = call.extension_start
        if extension and extension.contents.type == _METADATA:
            _fill(ctypes.cast(extension, POINTER(MetadataExtension)).contents.metadata.contents)
        elif call.stage == _EXECUTE:
            _execute(handler, call)
        return None
    except BaseException as error:  # The caller is C++ code, which cannot handle Python exceptions.
        arguments = ErrorCreate(
            ctypes.sizeof(ErrorCreate), None, f"{type(error).__name__}: {error}".encode(), _INTERNAL
        )
        api = frame.contents.api.contents
        create = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorCreate))(api.XLA_FFI_Error_Create)
        return create(ctypes.byref(arguments))


def _fill(metadata: Any) -> None:
    """Write the interface version that this handler implements to ``metadata``."""
    version = _version()
    assert version is not None
    metadata.api_version.struct_size = ctypes.sizeof(ApiVersion)
    metadata.api_version.major_version, metadata.api_version.minor_version = version
    metadata.traits = 0
    if metadata.struct_size > Metadata.state_type_id.offset:
        metadata.state_type_id = 0


def _text(span: Any) -> str:
    return ctypes.string_at(span.contents.ptr, span.contents.len).decode()


@functools.lru_cache(maxsize=1024)
def _shapes(text: str) -> list[list[tuple[tuple[int, ...], np.dtype[Any]]]]:
    return [[(tuple(shape), np.dtype(name)) for shape, name in side] for side in json.loads(text)]


def _addresses(size: int, buffers: int) -> Addresses:
    """Return the addresses of the buffers' data."""
    # Use integers, because creating ctypes objects for hundreds of gradients would take longer than the
    # exchange itself.
    offset = Buffer.data.offset
    pointers = (c_size_t * size).from_address(buffers)
    return tuple([c_size_t.from_address(pointer + offset).value for pointer in pointers])


# Cached, because XLA reuses the same memory. The views only refer to this memory and do not keep it alive.
@functools.lru_cache(maxsize=256)
def views_at(text: str, inputs: Addresses, outputs: Addresses) -> tuple[list[Array], list[Array]]:
    """Return views of the inputs and outputs, with the shapes and dtypes in ``text``."""
    shapes_in, shapes_out = _shapes(text)
    results = [array_at(address, *kind) for address, kind in zip(outputs, shapes_out, strict=True)]
    known = dict(zip(outputs, results, strict=True))
    # Use the same view for an input and an output that share memory. This tells the engine to work in place.
    sources = [
        known[address] if address in known and known[address].nbytes else array_at(address, *kind)
        for address, kind in zip(inputs, shapes_in, strict=True)
    ]
    return sources, results


@functools.cache
def _stream_get() -> int:
    """Return the position of XLA_FFI_Stream_Get in the table of XLA's functions."""
    names = members(_header(), "XLA_FFI_Api")
    later = names.index("XLA_FFI_Stream_Get") - names.index("XLA_FFI_Error_Create")
    return int(Api.XLA_FFI_Error_Create.offset) + later * ctypes.sizeof(c_void_p)


def _stream(frame: Any) -> int:
    """Return the handle of the GPU stream on which XLA runs the program."""
    function = c_size_t.from_address(ctypes.addressof(frame.api.contents) + _stream_get()).value
    arguments = StreamGet(ctypes.sizeof(StreamGet), None, frame.ctx, None)
    if ctypes.CFUNCTYPE(c_void_p, POINTER(StreamGet))(function)(ctypes.byref(arguments)):
        raise RuntimeError("XLA did not return the stream of the program.")
    return arguments.stream or 0


def _execute(handler: Handler, frame: Any) -> None:
    """Call the handler."""
    names, values = frame.attrs.names, frame.attrs.attrs
    attributes = {_text(names[index]): _text(values[index]) for index in range(frame.attrs.size)}
    inputs = _addresses(frame.args.size, frame.args.args)
    outputs = _addresses(frame.rets.size, frame.rets.rets)
    handler(attributes, inputs, outputs, functools.partial(_stream, frame))
