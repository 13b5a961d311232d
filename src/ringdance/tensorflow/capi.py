"""TensorFlow's C interface for operations and kernels, by ctypes: what is needed of it.

The functions are those of tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h, stable since 2.4. They are
called with the GIL held (``PyDLL``): each is short, and giving the GIL away would cost more than the call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

__all__ = ["Context", "register"]

Array = np.ndarray[Any, Any]

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "TF_NewStatus": (c_void_p, []),
    "TF_DeleteStatus": (None, [c_void_p]),
    "TF_SetStatus": (None, [c_void_p, c_int, c_char_p]),
    "TF_GetCode": (c_int, [c_void_p]),
    "TF_Message": (c_char_p, [c_void_p]),
    "TF_NewOpDefinitionBuilder": (c_void_p, [c_char_p]),
    "TF_OpDefinitionBuilderAddInput": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderAddOutput": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderAddAttr": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderSetIsStateful": (None, [c_void_p, ctypes.c_bool]),
    "TF_RegisterOpDefinition": (None, [c_void_p, c_void_p]),
    "TF_NewKernelBuilder": (c_void_p, [c_char_p, c_char_p, c_void_p, c_void_p, c_void_p]),
    "TF_RegisterKernelBuilder": (None, [c_char_p, c_void_p, c_void_p]),
    "TF_OpKernelConstruction_GetAttrSize": (
        None, [c_void_p, c_char_p, POINTER(c_int32), POINTER(c_int32), c_void_p]
    ),
    "TF_OpKernelConstruction_GetAttrString": (None, [c_void_p, c_char_p, c_char_p, c_size_t, c_void_p]),
    "TF_OpKernelContext_Failure": (None, [c_void_p, c_void_p]),
    "TF_NumInputs": (c_int, [c_void_p]),
    "TF_GetInput": (None, [c_void_p, c_int, POINTER(c_void_p), c_void_p]),
    "TF_SetOutput": (None, [c_void_p, c_int, c_void_p, c_void_p]),
    "TF_AllocateOutput": (
        c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64), c_int, c_size_t, c_void_p]
    ),
    "TF_ForwardInputOrAllocateOutput": (
        c_void_p, [c_void_p, POINTER(c_int), c_int, c_int, POINTER(c_int64), c_int, POINTER(c_int), c_void_p]
    ),
    "TF_DeleteTensor": (None, [c_void_p]),
    "TF_TensorType": (c_int, [c_void_p]),
    "TF_NumDims": (c_int, [c_void_p]),
    "TF_Dim": (c_int64, [c_void_p, c_int]),
    "TF_TensorData": (c_void_p, [c_void_p]),
}

# TF_DataType of tf_datatype.h.
_DTYPES: dict[int, np.dtype[Any]] = {
    number: np.dtype(kind)
    for number, kind in (
        (1, "float32"), (2, "float64"), (3, "int32"), (4, "uint8"), (5, "int16"), (6, "int8"), (9, "int64"),
        (10, "bool"), (14, ml_dtypes.bfloat16), (17, "uint16"), (19, "float16"), (22, "uint32"),
        (23, "uint64"),
    )
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}

_WRITE = 0x200  # PyBUF_WRITE
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = [c_void_p, ctypes.c_ssize_t, c_int]


@cache
def _library() -> Any:
    """Return TensorFlow's library with the functions declared.

    Raises:
        ImportError: this TensorFlow has no library with them.
    """
    folder = Path(tf.__file__).parent
    for pattern in ("libtensorflow_framework*", "libtensorflow_cc*", "python/_pywrap_tensorflow_internal*"):
        for path in sorted(folder.glob(pattern)):
            library = ctypes.PyDLL(str(path))
            if all(hasattr(library, name) for name in _FUNCTIONS):
                for name, (result, arguments) in _FUNCTIONS.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
                return library
    raise ImportError(
        f"ringdance.tensorflow does not find the C interface for kernels in TensorFlow {tf.__version__} "
        f"({folder}); versions from 2.16 on have it."
    )


def _array(address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, _memory(address, nbytes, _WRITE))


class Context:
    """One run of a kernel: its inputs and outputs as NumPy views."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer
        self._library = _library()
        self._status = self._library.TF_NewStatus()

    def close(self) -> None:
        """Free what belongs to this run."""
        self._library.TF_DeleteStatus(self._status)

    def fail(self, code: int, message: str) -> None:
        """Make the operation fail with TensorFlow's error of this code."""
        self._library.TF_SetStatus(self._status, code, message.encode(errors="replace"))
        self._library.TF_OpKernelContext_Failure(self._pointer, self._status)

    def _check(self) -> None:
        if self._library.TF_GetCode(self._status):
            raise RuntimeError(self._library.TF_Message(self._status).decode(errors="replace"))

    def take(self, index: int) -> int:
        """Return a reference to an input tensor; to be given to ``drop``."""
        handle = c_void_p()
        self._library.TF_GetInput(self._pointer, index, byref(handle), self._status)
        if handle.value is None:
            self._check()
        return handle.value or 0

    def drop(self, tensor: int) -> None:
        """Give a reference back."""
        self._library.TF_DeleteTensor(tensor)

    def view(self, tensor: int) -> Array:
        """Return a tensor's memory. It is valid as long as TensorFlow holds the tensor."""
        library = self._library
        dtype = _DTYPES[library.TF_TensorType(tensor)]
        shape = [library.TF_Dim(tensor, axis) for axis in range(library.TF_NumDims(tensor))]
        return _array(library.TF_TensorData(tensor), shape, dtype)

    @property
    def count(self) -> int:
        """Number of inputs."""
        return int(self._library.TF_NumInputs(self._pointer))

    def inputs(self) -> list[Array]:
        """Return views of all inputs, valid until the kernel returns."""
        views = []
        for index in range(self.count):
            tensor = self.take(index)
            views.append(self.view(tensor))
            self.drop(tensor)  # the caller of the kernel has its own; with ours it could not be forwarded
        return views

    def forward(self, index: int, view: Array) -> tuple[int, Array]:
        """Return a reference to output ``index`` and its memory, which is for the shape of input ``index``.

        Args:
            index: of the output, and of the input.
            view: the input's memory. It is returned itself where nobody else needs it.
        """
        library, shape = self._library, view.shape
        used = c_int(-1)
        tensor: int = library.TF_ForwardInputOrAllocateOutput(
            self._pointer, byref(c_int(index)), 1, index, (c_int64 * len(shape))(*shape), len(shape),
            byref(used), self._status,
        )
        if used.value == index:
            return tensor, view
        self._check()
        return tensor, _array(library.TF_TensorData(tensor), shape, view.dtype)

    def put(self, index: int, array: Array) -> None:
        """Make a copy of an array output ``index``."""
        shape = (c_int64 * array.ndim)(*array.shape)
        tensor = self._library.TF_AllocateOutput(
            self._pointer, index, _NUMBERS[array.dtype], shape, array.ndim, array.nbytes, self._status
        )
        self._check()
        self.view(tensor)[...] = array
        self.drop(tensor)

    def pass_on(self, index: int, tensor: int) -> None:
        """Make a tensor output ``index``."""
        self._library.TF_SetOutput(self._pointer, index, tensor, self._status)
        self._check()


_CREATE = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_COMPUTE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
# What TensorFlow calls must live as long as it does; kernels are known by their place in the list, one for
# each different text, and never deleted: TensorFlow frees kernels after Python has ended.
_callbacks: list[Any] = []
_texts: list[str] = [""]
_places: dict[str, int] = {"": 0}


def _attribute(construction: int, name: bytes) -> str:
    library = _library()
    status = library.TF_NewStatus()
    try:
        listed, total = c_int32(), c_int32()
        library.TF_OpKernelConstruction_GetAttrSize(construction, name, byref(listed), byref(total), status)
        buffer = ctypes.create_string_buffer(total.value + 1)
        library.TF_OpKernelConstruction_GetAttrString(construction, name, buffer, total.value, status)
        return buffer.value.decode()
    finally:
        library.TF_DeleteStatus(status)


def register(
    name: str, attribute: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str],
    compute: Callable[[str, Context], None],
) -> None:
    """Make a stateful operation known to TensorFlow, with a kernel for the CPU.

    Args:
        name: of the operation.
        attribute: its attribute of type string, by which kernels differ.
        inputs: specifications as in TensorFlow's ``REGISTER_OP``; so are the next two.
        outputs: likewise.
        attributes: those beside ``attribute``.
        compute: is called with the attribute's value and the context; it must not raise.
    """
    library = _library()
    status = library.TF_NewStatus()
    builder = library.TF_NewOpDefinitionBuilder(name.encode())
    for one in inputs:
        library.TF_OpDefinitionBuilderAddInput(builder, one.encode())
    for one in outputs:
        library.TF_OpDefinitionBuilderAddOutput(builder, one.encode())
    for one in (f"{attribute}: string", *attributes):
        library.TF_OpDefinitionBuilderAddAttr(builder, one.encode())
    library.TF_OpDefinitionBuilderSetIsStateful(builder, True)
    library.TF_RegisterOpDefinition(builder, status)

    def created(construction: int) -> int:
        text = _attribute(construction, attribute.encode())
        if text not in _places:
            _texts.append(text)
            _places[text] = len(_texts) - 1
        return _places[text]

    def computed(place: int | None, pointer: int) -> None:
        context = Context(pointer)
        try:
            compute(_texts[place or 0], context)
        finally:
            context.close()

    create, run = _CREATE(created), _COMPUTE(computed)
    _callbacks.extend((create, run))
    kernel = library.TF_NewKernelBuilder(
        name.encode(), b"CPU", ctypes.cast(create, c_void_p), ctypes.cast(run, c_void_p), None
    )
    library.TF_RegisterKernelBuilder(name.encode(), kernel, status)
    code, message = library.TF_GetCode(status), library.TF_Message(status)
    library.TF_DeleteStatus(status)
    if code:
        raise ImportError(f"TensorFlow {tf.__version__} does not take {name}: {message.decode()}")
