"""ctypes wrapper for the part of TensorFlow's C API that defines operations and kernels."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache, lru_cache
from typing import Any

import numpy as np
import tensorflow as tf

from ringdance.core.exchange import aligned_empty
from ringdance.errors import ArgumentError
from ringdance.tensorflow.errors import code_of
from ringdance.tensorflow.graph.c_functions import library
from ringdance.training.collectives import array_at
from ringdance.training.elastic import remember

Array = np.ndarray[Any, Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    kind.as_datatype_enum: np.dtype(kind.as_numpy_dtype)
    for kind in (
        tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8,
        tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.complex128,
    )
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def _dtype(number: int) -> np.dtype[Any]:
    if number not in _DTYPES:
        name = tf.as_dtype(number).name
        raise ArgumentError(
            f"Tensors of type {name} cannot be exchanged. Convert them to a numeric or boolean dtype."
        )
    return _DTYPES[number]


# Cached, because TensorFlow reuses memory addresses. A view does not own the memory.
_view_at: Callable[..., Array] = lru_cache(maxsize=1 << 14)(array_at)


def drop(tensor: int | c_void_p) -> None:
    """Release a reference to a tensor."""
    library().TF_DeleteTensor(tensor)


class Slot:
    """Static shape and dtype of a kernel's input.

    Args:
        index: Index of the input, and of the output with the same shape and dtype.
        number: TensorFlow's enum value for the input's dtype.
        shape: The static shape, or None if it is not fully known before run time.
    """

    __slots__ = ("candidate", "dims", "kind", "nbytes")

    def __init__(self, index: int, number: int, shape: Sequence[int] | None) -> None:
        dtype = None if shape is None else _DTYPES.get(number)
        lengths = tuple(shape or ())
        self.kind = lengths, dtype
        self.nbytes = -1 if dtype is None else math.prod(lengths) * dtype.itemsize
        self.dims = (c_int64 * len(lengths))(*lengths)
        self.candidate = byref(c_int(index))


class Context:
    """The context of one kernel run. Gives access to inputs and outputs as NumPy views."""

    def __init__(self, pointer: int, status: int) -> None:
        self._pointer = pointer
        self._library = library()
        self._status = status

    def _check(self) -> None:
        if self._library.TF_GetCode(self._status):
            raise RuntimeError(self._library.TF_Message(self._status).decode(errors="replace"))

    def _take(self, index: int) -> c_void_p:
        """Return a new reference to an input tensor. Release it with ``drop``."""
        handle = c_void_p()
        self._library.TF_GetInput(self._pointer, index, byref(handle), self._status)
        if not handle:
            self._check()
        return handle

    def _view(self, tensor: int | c_void_p) -> Array:
        """Return a view of a tensor's memory. The view is valid as long as TensorFlow keeps the tensor."""
        library = self._library
        shape = tuple([library.TF_Dim(tensor, axis) for axis in range(library.TF_NumDims(tensor))])
        return array_at(library.TF_TensorData(tensor), shape, _dtype(library.TF_TensorType(tensor)))

    def inputs(self) -> list[Array]:
        """Return views of all inputs. The views are valid until the kernel returns."""
        views = []
        for index in range(self._library.TF_NumInputs(self._pointer)):
            tensor = self._take(index)
            try:
                views.append(self._view(tensor))
            finally:
                drop(tensor)  # The kernel's caller has its own reference.
        return views

    def in_place(self, slots: Sequence[Slot]) -> tuple[list[Array], list[Array], list[int | c_void_p]]:
        """Allocate an output with the shape and dtype of each input, reusing the input's memory if possible.

        This runs for hundreds of gradients in each step, so it makes as few C calls per tensor as possible.

        Args:
            slots: The slot of each input.

        Returns:
            Views of the inputs, views of the outputs (the same objects if the memory is the same), and the
            references to release with ``drop`` after the last access through the views.
        """
        library, pointer, status = self._library, self._pointer, self._status
        get, data, size, drop = (
            library.TF_GetInput, library.TF_TensorData, library.TF_TensorByteSize, library.TF_DeleteTensor
        )
        forward = library.TF_ForwardInputOrAllocateOutput
        handle, used = c_void_p(), c_int(-1)
        to_handle, to_used = byref(handle), byref(used)
        inputs, outputs = [], []
        kept: list[int | c_void_p] = []
        try:
            for index, slot in enumerate(slots):
                get(pointer, index, to_handle, status)
                # A static shape may be wrong (``set_shape``), so compare it with the tensor's actual size.
                known = size(handle) == slot.nbytes
                try:
                    view = _view_at(data(handle), *slot.kind) if known else self._view(handle)
                finally:
                    drop(handle)  # While this reference exists, the output cannot use the input's memory.
                dims = slot.dims if known else (c_int64 * view.ndim)(*view.shape)
                tensor = forward(pointer, slot.candidate, 1, index, dims, len(dims), to_used, status)
                if tensor is None:
                    self._check()
                kept.append(tensor)
                inputs.append(view)
                if used.value == index:
                    outputs.append(view)
                    continue
                # The input must stay in memory until it has been read.
                kept.append(self._take(index))
                outputs.append(_view_at(data(tensor), *slot.kind) if known else self._view(tensor))
        except BaseException:
            for tensor in kept:
                drop(tensor)
            raise
        return inputs, outputs, kept

    def set_output(self, index: int, array: Array) -> None:
        """Set output ``index`` to a copy of an array."""
        shape = (c_int64 * array.ndim)(*array.shape)
        tensor = self._library.TF_AllocateOutput(
            self._pointer, index, _NUMBERS[array.dtype], shape, array.ndim, array.nbytes, self._status
        )
        self._check()
        self._view(tensor)[...] = array
        drop(tensor)

    def set_number(self, index: int, number: int, on_free: Callable[[int], None]) -> None:
        """Set output ``index`` to an int64 scalar.

        Args:
            index: Index of the output.
            number: Value of the output. It must be different in each call.
            on_free: Called with the number, on any thread, when the last reference to the output is released.
                By then, all operations that read it have run, or the graph run has failed. Must not raise.
        """
        memory = aligned_empty((1,), np.dtype(np.int64))  # TensorFlow would copy unaligned memory.
        memory[0] = number
        _numbers_in_use[number] = memory, on_free
        tensor = self._library.TF_NewTensor(
            _NUMBERS[memory.dtype], None, 0, memory.ctypes.data, 8, ctypes.cast(_freed, c_void_p), number
        )
        self._library.TF_SetOutput(self._pointer, index, tensor, self._status)
        drop(tensor)
        self._check()


# Maps each number from ``set_number`` to the output's memory and the function to call on release.
_numbers_in_use: dict[int, tuple[Array, Callable[[int], None]]] = {}


def _on_free(data: int, length: int, number: int) -> None:
    """Drop the reference to an output's memory. TensorFlow calls this function as a tensor's deallocator."""
    _, on_free = _numbers_in_use.pop(number)
    on_free(number)


_freed = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_void_p)(_on_free)
_CREATE = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_COMPUTE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
_callbacks: list[Any] = []  # References to functions that TensorFlow may call at any time.


def _text_of(construction: int) -> bytes:
    lib = library()
    status = lib.TF_NewStatus()
    try:
        _, total = pair = c_int32(), c_int32()
        lib.TF_OpKernelConstruction_GetAttrSize(construction, b"text", *map(byref, pair), status)
        buffer = ctypes.create_string_buffer(total.value + 1)
        lib.TF_OpKernelConstruction_GetAttrString(construction, b"text", buffer, total.value, status)
        return buffer.value
    finally:
        lib.TF_DeleteStatus(status)


def _define(
    name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str], status: int
) -> None:
    """Define a stateful operation. If TensorFlow reports an error, ``status`` contains it."""
    lib = library()
    builder = lib.TF_NewOpDefinitionBuilder(name.encode())
    for add, specifications in (
        (lib.TF_OpDefinitionBuilderAddInput, inputs),
        (lib.TF_OpDefinitionBuilderAddOutput, outputs),
        (lib.TF_OpDefinitionBuilderAddAttr, ("text: string", *attributes)),
    ):
        for specification in specifications:
            add(builder, specification.encode())
    lib.TF_OpDefinitionBuilderSetIsStateful(builder, True)
    lib.TF_RegisterOpDefinition(builder, status)


def register(
    name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str],
    prepare: Callable[[str], Any], compute: Callable[[Any, Context], None],
) -> None:
    """Register a stateful operation with a CPU kernel.

    Note [Kernels]: For each kernel, TensorFlow keeps only a number that identifies its ``text`` attribute.
    Numbers need not be released. This matters because TensorFlow deletes the last kernels after Python exits.

    Args:
        name: Name of the operation.
        inputs: Input specifications, as in TensorFlow's ``REGISTER_OP``.
        outputs: Output specifications.
        attributes: Specifications of attributes other than ``text``.
        prepare: Called once for each value of ``text``. Its result is passed to ``compute``.
        compute: Called with the prepared value and the context.
    """
    lib = library()
    status = lib.TF_NewStatus()
    _define(name, inputs, outputs, attributes, status)
    numbers = itertools.count(1)
    prepared: dict[int, Any] = {}

    @cache
    def number_of(text: bytes) -> int:
        number = next(numbers)
        prepared[number] = prepare(text.decode())
        return number

    def created(construction: int) -> int:
        return number_of(_text_of(construction))

    def computed(kernel: int, pointer: int) -> None:
        status = lib.TF_NewStatus()
        try:
            compute(prepared[kernel], Context(pointer, status))
        except BaseException as error:
            remember(error)
            message = str(error) or type(error).__name__
            lib.TF_SetStatus(status, code_of(error), message.encode(errors="replace"))
            lib.TF_OpKernelContext_Failure(pointer, status)
        finally:
            lib.TF_DeleteStatus(status)

    create, run = _CREATE(created), _COMPUTE(computed)
    _callbacks.extend((create, run))
    kernel = lib.TF_NewKernelBuilder(
        name.encode(), b"CPU", ctypes.cast(create, c_void_p), ctypes.cast(run, c_void_p), None
    )
    lib.TF_RegisterKernelBuilder(name.encode(), kernel, status)
    code, message = lib.TF_GetCode(status), lib.TF_Message(status)
    lib.TF_DeleteStatus(status)
    if code:
        raise ImportError(f"TensorFlow {tf.__version__} cannot register operation {name}: {message.decode()}")
