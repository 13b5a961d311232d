"""TensorFlow's C functions for operations and kernels.

The functions are declared in tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h and have been stable since 2.4.
They are called with the GIL held (``PyDLL``), because releasing the GIL would take longer than the call.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

# Opaque TensorFlow objects, named as in the headers.
Status = Tensor = OpBuilder = KernelBuilder = Construction = OpContext = c_void_p
Code = DataType = Int = c_int
Bool, Int64, Size, Text, Pointer = c_bool, c_int64, c_size_t, c_char_p, c_void_p

# The result type of each function, followed by its argument types.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "TF_NewStatus": (Status,),
    "TF_DeleteStatus": (None, Status),
    "TF_SetStatus": (None, Status, Code, Text),
    "TF_GetCode": (Code, Status),
    "TF_Message": (Text, Status),
    "TF_NewTensor": (Tensor, DataType, Pointer, Int, Pointer, Size, Pointer, Pointer),
    "TF_DeleteTensor": (None, Tensor),
    "TF_TensorType": (DataType, Tensor),
    "TF_NumDims": (Int, Tensor),
    "TF_Dim": (Int64, Tensor, Int),
    "TF_TensorData": (Pointer, Tensor),
    "TF_TensorByteSize": (Size, Tensor),
    "TF_NewOpDefinitionBuilder": (OpBuilder, Text),
    "TF_OpDefinitionBuilderAddInput": (None, OpBuilder, Text),
    "TF_OpDefinitionBuilderAddOutput": (None, OpBuilder, Text),
    "TF_OpDefinitionBuilderAddAttr": (None, OpBuilder, Text),
    "TF_OpDefinitionBuilderSetIsStateful": (None, OpBuilder, Bool),
    "TF_RegisterOpDefinition": (None, OpBuilder, Status),
    "TF_NewKernelBuilder": (KernelBuilder, Text, Text, Pointer, Pointer, Pointer),
    "TF_RegisterKernelBuilder": (None, Text, KernelBuilder, Status),
    "TF_OpKernelConstruction_GetAttrSize": (None, Construction, Text, Pointer, Pointer, Status),
    "TF_OpKernelConstruction_GetAttrString": (None, Construction, Text, Pointer, Size, Status),
    "TF_NumInputs": (Int, OpContext),
    "TF_GetInput": (None, OpContext, Int, Pointer, Status),
    "TF_SetOutput": (None, OpContext, Int, Tensor, Status),
    "TF_AllocateOutput": (Tensor, OpContext, Int, DataType, Pointer, Int, Size, Status),
    "TF_ForwardInputOrAllocateOutput": (Tensor, OpContext, Pointer, Int, Int, Pointer, Int, Pointer, Status),
    "TF_OpKernelContext_Failure": (None, OpContext, Status),
}


@cache
def library() -> Any:
    """Return TensorFlow's shared library with the C functions declared.

    Raises:
        ImportError: No library of this TensorFlow version contains all of the C functions.
    """
    directory = Path(tf.__file__).parent
    for pattern in ("libtensorflow_framework*", "libtensorflow_cc*", "python/_pywrap_tensorflow_internal*"):
        for path in sorted(directory.glob(pattern)):
            loaded = ctypes.PyDLL(str(path))
            if all(hasattr(loaded, name) for name in _FUNCTIONS):
                for name, (result, *arguments) in _FUNCTIONS.items():
                    function = getattr(loaded, name)
                    function.restype, function.argtypes = result, arguments
                return loaded
    raise ImportError(
            f"ringdance.tensorflow cannot find the C interface for kernels in TensorFlow {tf.__version__} "
            f"({directory}). Use TensorFlow 2.16 or later."
    )
