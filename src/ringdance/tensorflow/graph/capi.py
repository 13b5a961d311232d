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
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
import tensorflow as tf

from ringdance.core.exchange import aligned_empty
from ringdance.errors import ArgumentError

__all__ = ["Context", "Slot", "drop", "register"]

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
    "TF_AllocateOutput": (
        c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64), c_int, c_size_t, c_void_p]
    ),
    "TF_ForwardInputOrAllocateOutput": (
        c_void_p, [c_void_p, POINTER(c_int), c_int, c_int, POINTER(c_int64), c_int, POINTER(c_int), c_void_p]
    ),
    "TF_NewTensor": (
        c_void_p, [c_int, POINTER(c_int64), c_int, c_void_p, c_size_t, c_void_p, c_void_p]
    ),
    "TF_SetOutput": (None, [c_void_p, c_int, c_void_p, c_void_p]),
    "TF_DeleteTensor": (None, [c_void_p]),
    "TF_TensorType": (c_int, [c_void_p]),
    "TF_NumDims": (c_int, [c_void_p]),
    "TF_Dim": (c_int64, [c_void_p, c_int]),
    "TF_TensorData": (c_void_p, [c_void_p]),
    "TF_TensorByteSize": (c_size_t, [c_void_p]),
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

_MOST_VIEWS = 1024  # remembered for each type and shape
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


def _dtype(number: int) -> np.dtype[Any]:
    try:
        return _DTYPES[number]
    except KeyError:
        name = tf.as_dtype(number).name
        text = f"Elements of type {name} cannot be exchanged: numbers and booleans can, but no complex ones."
        raise ArgumentError(text) from None


class _Views(dict[int, Array]):
    """Views for all inputs of a type and shape, by address: TensorFlow uses memory again and again."""


_views: WeakValueDictionary[tuple[np.dtype[Any], tuple[int, ...]], _Views] = WeakValueDictionary()


def drop(tensor: int | c_void_p) -> None:
    """Give a reference to a tensor back."""
    _library().TF_DeleteTensor(tensor)


class Slot:
    """What a graph knows of one input before it runs, so that a run need not ask.

    Args:
        index: of the input, and of the output that is like it.
        number: its type, by TensorFlow's number.
        shape: all of it, or None if it is known only at run time.
    """

    __slots__ = ("_views", "candidate", "dims", "dtype", "nbytes", "shape")

    def __init__(self, index: int, number: int, shape: Sequence[int] | None) -> None:
        known = shape is not None and number in _DTYPES
        self.dtype = _DTYPES[number] if known else None
        self.shape = tuple(shape or ())
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize if self.dtype is not None else -1
        self.dims = (c_int64 * len(self.shape))(*self.shape)
        self.candidate = byref(c_int(index))
        self._views = _Views()
        if self.dtype is not None:
            self._views = _views.setdefault((self.dtype, self.shape), self._views)

    def view(self, address: int) -> Array:
        """Return the memory at this address as a view."""
        found = self._views.get(address)
        if found is None:
            assert self.dtype is not None
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[address] = _array(address, self.shape, self.dtype)
        return found


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

    def _take(self, index: int) -> c_void_p:
        """Return a reference to an input tensor; to be given to ``drop``."""
        handle = c_void_p()
        self._library.TF_GetInput(self._pointer, index, byref(handle), self._status)
        if not handle:
            self._check()
        return handle

    def _view(self, tensor: int | c_void_p) -> Array:
        """Return a tensor's memory. It is valid as long as TensorFlow holds the tensor."""
        library = self._library
        shape = [library.TF_Dim(tensor, axis) for axis in range(library.TF_NumDims(tensor))]
        return _array(library.TF_TensorData(tensor), shape, _dtype(library.TF_TensorType(tensor)))

    def inputs(self) -> list[Array]:
        """Return views of all inputs, valid until the kernel returns."""
        views = []
        for index in range(self._library.TF_NumInputs(self._pointer)):
            tensor = self._take(index)
            try:
                views.append(self._view(tensor))
            finally:
                drop(tensor)  # the caller of the kernel has its own
        return views

    def lend(self, slots: Sequence[Slot]) -> tuple[list[Array], list[Array], list[int | c_void_p]]:
        """Make an output like each input, in the input's own memory where nobody else needs that.

        Hundreds of gradients pass here in each step, so it makes as few calls for each as can be.

        Args:
            slots: one for each input.

        Returns:
            Views of the inputs; of the outputs, which are the same objects where the memory is the same; and
            references, to be given to ``drop`` when nobody reads or writes through the views any more.
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
                # A static shape can be wrong (``set_shape``): memory is what the tensor says.
                known = size(handle) == slot.nbytes
                try:
                    view = slot.view(data(handle)) if known else self._view(handle)
                finally:
                    drop(handle)  # with a reference of ours it could not become the output
                dims = slot.dims if known else (c_int64 * view.ndim)(*view.shape)
                tensor = forward(
                    pointer, slot.candidate, 1, index, dims, len(dims), to_used, status
                )
                if tensor is None:
                    self._check()
                kept.append(tensor)
                inputs.append(view)
                if used.value == index:
                    outputs.append(view)
                    continue
                # The input must stay where it is until it has been read.
                kept.append(self._take(index))
                outputs.append(slot.view(data(tensor)) if known else self._view(tensor))
        except BaseException:
            for tensor in kept:
                drop(tensor)
            raise
        return inputs, outputs, kept

    def put(self, index: int, array: Array) -> None:
        """Make a copy of an array output ``index``."""
        shape = (c_int64 * array.ndim)(*array.shape)
        tensor = self._library.TF_AllocateOutput(
            self._pointer, index, _NUMBERS[array.dtype], shape, array.ndim, array.nbytes, self._status
        )
        self._check()
        self._view(tensor)[...] = array
        drop(tensor)

    def put_number(self, index: int, number: int, on_free: Callable[[int], None]) -> None:
        """Make an int64 scalar output ``index``.

        Args:
            index: of the output.
            number: its value, another one each time.
            on_free: is called with it, on any thread, once nobody holds the output any more: the operations
                that read it have run, or the graph's run has ended in an error. It must not raise.
        """
        memory = aligned_empty((1,), np.dtype(np.int64))  # TensorFlow would copy what is not aligned
        memory[0] = number
        _lent[number] = memory, on_free
        tensor = self._library.TF_NewTensor(
            _NUMBERS[memory.dtype], None, 0, memory.ctypes.data, 8, ctypes.cast(_freed, c_void_p), number
        )
        self._library.TF_SetOutput(self._pointer, index, tensor, self._status)
        drop(tensor)
        self._check()


# Memory of the outputs of ``put_number``, and what is to be called when it is free.
_lent: dict[int, tuple[Array, Callable[[int], None]]] = {}


def _take_back(data: int, length: int, number: int) -> None:
    """Forget the memory of an output; TensorFlow's ``deallocator``."""
    _, on_free = _lent.pop(number)
    on_free(number)


_freed = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_void_p)(_take_back)
_CREATE = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_COMPUTE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
_callbacks: list[Any] = []  # what TensorFlow calls must live as long as it does
# Note [Kernels]: a kernel is known by the address of eight zero bytes. When TensorFlow deletes it, with the
# function it belongs to, it calls the C library's ``time(address)``, which writes a number there. It cannot
# call Python: the last kernels are deleted after Python has ended.
_carried: dict[int, Any] = {}
_LEAST_SWEEP = 64
_sweep_at = _LEAST_SWEEP


@cache
def _c_library() -> Any:
    library = ctypes.PyDLL(None)
    library.calloc.restype, library.calloc.argtypes = c_void_p, [c_size_t, c_size_t]
    library.free.restype, library.free.argtypes = None, [c_void_p]
    return library


def _carry(prepared: Any) -> int:
    """Keep what a kernel carries; return its address. See Note [Kernels]."""
    global _sweep_at
    if len(_carried) >= _sweep_at:  # so that looking at all takes little for each
        for address in [one for one in list(_carried) if c_int64.from_address(one).value]:
            del _carried[address]
            _c_library().free(address)
        _sweep_at = max(_LEAST_SWEEP, 2 * len(_carried))
    address = int(_c_library().calloc(1, 8))
    _carried[address] = prepared
    return address


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
    name: str, texts: Sequence[str], inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str],
    prepare: Callable[..., Any], compute: Callable[[Any, Context], None],
) -> None:
    """Make a stateful operation known to TensorFlow, with a kernel for the CPU.

    Args:
        name: of the operation.
        texts: its attributes of type string, by which kernels differ.
        inputs: specifications as in TensorFlow's ``REGISTER_OP``; so are the next two.
        outputs: likewise.
        attributes: those beside ``texts``.
        prepare: is called for each kernel with the values of ``texts``; what it returns is given to
            ``compute``.
        compute: is called with that and the context; it must not raise.
    """
    library = _library()
    status = library.TF_NewStatus()
    builder = library.TF_NewOpDefinitionBuilder(name.encode())
    for one in inputs:
        library.TF_OpDefinitionBuilderAddInput(builder, one.encode())
    for one in outputs:
        library.TF_OpDefinitionBuilderAddOutput(builder, one.encode())
    for one in (*[f"{text}: string" for text in texts], *attributes):
        library.TF_OpDefinitionBuilderAddAttr(builder, one.encode())
    library.TF_OpDefinitionBuilderSetIsStateful(builder, True)
    library.TF_RegisterOpDefinition(builder, status)

    def created(construction: int) -> int:
        return _carry(prepare(*[_attribute(construction, text.encode()) for text in texts]))

    def computed(address: int, pointer: int) -> None:
        context = Context(pointer)
        try:
            compute(_carried[address], context)
        finally:
            context.close()

    create, run = _CREATE(created), _COMPUTE(computed)
    _callbacks.extend((create, run))
    kernel = library.TF_NewKernelBuilder(
        name.encode(), b"CPU", ctypes.cast(create, c_void_p), ctypes.cast(run, c_void_p),
        ctypes.cast(_c_library().time, c_void_p),
    )
    library.TF_RegisterKernelBuilder(name.encode(), kernel, status)
    code, message = library.TF_GetCode(status), library.TF_Message(status)
    library.TF_DeleteStatus(status)
    if code:
        raise ImportError(f"TensorFlow {tf.__version__} does not take {name}: {message.decode()}")
