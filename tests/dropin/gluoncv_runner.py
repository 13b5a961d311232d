"""Run a GluonCV script without a GPU: `python gluoncv_runner.py SCRIPT WORD ...`.

The script is not changed. ``mx.gpu`` returns the host. GluonCV's own faults, as docs/coming-from-horovod.md
describes them, are fixed: AutoGluon's old module, which the ImageNet script imports for images of 320 pixels
or more, is an empty one here, and ``custom-model`` builds the right Faster R-CNN, not the one with two heads.
"""

import runpy
import sys
import types

import mxnet as mx
from gluoncv.model_zoo import model_zoo
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn

mx.gpu = mx.cpu
package, utils = types.ModuleType("autogluon"), types.ModuleType("autogluon.utils")
utils.pil_transforms = types.ModuleType("autogluon.utils.pil_transforms")  # type: ignore[attr-defined]
sys.modules |= {"autogluon": package, "autogluon.utils": utils}
model_zoo._models["custom_faster_rcnn_fpn"] = custom_faster_rcnn_fpn
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
