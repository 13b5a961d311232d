"""GluonCV's own scripts with `--horovod`, unchanged, on two ranks and a few COCO photographs.

``GLUONCV_SCRIPTS`` is the `scripts` directory of GluonCV's repository. ``COCO_SAMPLE`` is a directory with
``train2017`` and ``annotations/instances_train2017.json``. GluonCV must be installed:
``pip install --no-deps gluoncv==0.10.5.post0``, then pycocotools, opencv-python-headless, yacs, tqdm and
matplotlib.
"""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("mxnet")

import mxnet as mx
import numpy as np
from script_jobs import ROOT, Outcome, run_each

SCRIPTS = Path(os.environ.get("GLUONCV_SCRIPTS", ""))
SAMPLE = Path(os.environ.get("COCO_SAMPLE", ""))
IMAGES = 6
RUNNER = ROOT / "tests" / "dropin" / "gluoncv_runner.py"
SIZE = ["custom-model", "--no-pretrained-base", "--image-short", "224", "--image-max-size", "320"]
SIZE += ["--rpn-train-pre-nms", "400", "--rpn-train-post-nms", "100", "--rcnn-num-samples", "32"]
SIZE += ["--rpn-test-pre-nms", "200", "--rpn-test-post-nms", "50", "--anchor-alloc-size", "128,128"]
COMMON = ["--dataset", "coco", "--network", "resnet18_v1b", "--horovod", "--kv-store", "local"]
COMMON += ["--batch-size", "2", "--num-workers", "1", "--epochs", "1", "--log-interval", "1"]
COMMON += ["--lr", "1e-6", "--lr-warmup", "10"]  # frozen layers were never trained, so the rate must stay low

pytestmark = [
    pytest.mark.slow,
    pytest.mark.limit(1200),
    pytest.mark.skipif(not os.environ.get("GLUONCV_SCRIPTS"), reason="needs GLUONCV_SCRIPTS"),
    pytest.mark.skipif(find_spec("gluoncv") is None, reason="needs GluonCV"),
]
needs_coco = pytest.mark.skipif(not os.environ.get("COCO_SAMPLE"), reason="needs COCO_SAMPLE")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a home directory with a few COCO images where GluonCV looks for the whole data set."""
    root = tmp_path / ".mxnet" / "datasets" / "coco"
    (root / "annotations").mkdir(parents=True)
    whole = json.loads((SAMPLE / "annotations" / "instances_train2017.json").read_text())
    images = [one | {"coco_url": f"train2017/{one['file_name']}"} for one in whole["images"][:IMAGES]]
    chosen = {image["id"] for image in images}
    objects = [annotation for annotation in whole["annotations"] if annotation["image_id"] in chosen]
    few = json.dumps(whole | {"images": images, "annotations": objects})
    for split in ("train2017", "val2017"):
        (root / split).symlink_to(SAMPLE / "train2017")
        (root / "annotations" / f"instances_{split}.json").write_text(few)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(script: str, words: list[str], directory: Path) -> Outcome:
    done = run_each("mpiexec", 2, [str(RUNNER), str(SCRIPTS / script), *words], directory)
    assert done.code == 0, done.out[-3000:] + done.err[-6000:]
    return done


def check_losses(done: Outcome) -> None:
    """Check the first stage's losses only. On hosts, the second stage overflows without Horovod, too."""
    pattern = r"\[Epoch 0\]\[Batch \d+\], Speed: .*RPN_Conf=([\d.]+),RPN_SmoothL1=([\d.]+),"
    losses = re.findall(pattern, done.err)
    assert len(losses) >= IMAGES // 2
    assert all(0 < float(array) < 2 for pair in losses for array in pair)


@needs_coco
def test_faster_rcnn(home: Path) -> None:
    done = run("detection/faster_rcnn/train_faster_rcnn.py", [*COMMON, *SIZE], home)
    check_losses(done)
    assert any(name.endswith(".params") for name in done.files())


@needs_coco
def test_mask_rcnn(home: Path) -> None:
    """It evaluates on all ranks and gathers the results with mpi4py."""
    done = run("instance/mask_rcnn/train_mask_rcnn.py", [*COMMON, *SIZE], home)
    check_losses(done)
    assert "Validation Inference cost" in done.err


def test_imagenet(tmp_path: Path) -> None:
    for name in ("train", "val"):
        paths = [str(tmp_path / f"{name}.{ending}") for ending in ("idx", "rec")]
        record = mx.recordio.MXIndexedRecordIO(*paths, "w")
        for number in range(16):
            image = np.random.default_rng(number).integers(0, 256, (72, 72, 3), np.uint8)
            record.write_idx(number, mx.recordio.pack_img(mx.recordio.IRHeader(0, number, number, 0), image))
        record.close()
    words = ["--rec-train", str(tmp_path / "train.rec"), "--rec-val", str(tmp_path / "val.rec"), "--no-cuda"]
    words += ["--model", "resnet18_v1b", "--batch-size", "4", "--input-size", "64", "--num-epochs", "1"]
    words += ["--data-nthreads", "2", "--log-interval", "1", "--warmup-epochs", "0"]
    done = run("classification/imagenet/train_horovod.py", words, tmp_path)
    assert len(re.findall(r"Loss\[[\d.]+\]", done.err)) == 2
    assert "Validation-accuracy" in done.err
    assert sorted(path.name for path in (tmp_path / "params").iterdir()) == [
        "imagenet-resnet18_v1b-0.params", "imagenet-resnet18_v1b-0.states",
    ]  # fmt: skip
