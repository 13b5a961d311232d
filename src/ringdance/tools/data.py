"""The command line of ``ringdance data``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ringdance.data.prepare import coco, criteo, inspect, prepare
from ringdance.data.prepare.foreign import index
from ringdance.data.prepare.generate import generate
from ringdance.data.prepare.sources import SPLITS
from ringdance.data.tables.writing import ENDS
from ringdance.data.writing import ENDINGS
from ringdance.host.limits import usable_cores
from ringdance.launch import subcommands
from ringdance.launch.parser import at_least, positive
from ringdance.launch.subcommands import Subcommand

LEFT_OUT = 3
"""Exit code if the data set is complete except for broken images, which were left out."""

_DESCRIPTION = "Prepare image data sets and click logs for training, check them, and describe them."
_EPILOG = """\
examples:
  ringdance data prepare imagenet /data/ILSVRC /fast/imagenet --format tfrecord --shards 1024
  ringdance data prepare criteo /data/train.txt /fast/criteo --validation 0.1
  ringdance data prepare coco /data/coco /fast/coco   check boxes and masks
  ringdance data verify /fast/imagenet --decode       check checksums and images
  ringdance data info /fast/imagenet                  show splits, classes, sizes
  ringdance data index /data/tfrecords                index TFRecords or tars from other tools
  ringdance data generate criteo /fast/generated      generate click logs for trying out training

Requires the package google-crc32c, and pillow and simplejpeg for images or pyarrow for click logs.
`ringdance data COMMAND --help` shows all options.
"""
_RESUMED = """
Files get their final names only when they are complete. After Ctrl-C, kill -9 or a crash, run the same
command again to resume. The result is byte-for-byte the same, even with a different number of processes.

exit code: 0; 3 if broken items were left out; 2 on errors"""
_PREPARE = """\
SRC is one of the following. Classes are numbered from 0 in the order of their names.
  class directories        SRC/n01440764/*.JPEG, or SRC/train/n01440764/*.JPEG and SRC/val/n01440764/*.JPEG;
                           also training, valid and validation, in upper or lower case. Other directories are
                           reported, but not read.
  Kaggle's archive         the directory above ILSVRC, or ILSVRC, Data or CLS-LOC in it. The labels of val
                           come from LOC_val_solution.csv.
  official files           ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar. The labels of val come from a
                           text file with a class per line (imagenet_2012_validation_synset_labels.txt) or
                           with lines `IMAGE CLASS`.

examples:
  ringdance data prepare imagenet /data/ILSVRC /fast/imagenet --format tfrecord --shards 1024 -np 16
  ringdance data prepare imagenet /data/flowers /fast/flowers --format webdataset --split train
  ringdance data prepare imagenet /data/ILSVRC /shared/imagenet-256 --resize 256

Images are copied byte for byte, except that --resize shrinks larger images, EXIF rotation is applied, and
images other than RGB or grayscale JPEGs are converted, such as CMYK images and PNGs (16 bits become 8, and
transparent pixels become white). Damaged images are left out. DST/SPLIT.problems.tsv lists both converted and
damaged images.
""" + _RESUMED
_PREPARE_CLICKS = """\
SRC, optionally compressed as .gz, .bz2, .xz or .zst:
  Criteo's files           train.txt, day_0 to day_23, or CSV: label, 13 numbers, 26 categories, separated by
                           tabs or commas, with or without a header line; or Parquet with these column names
  LibSVM, TFRecords, .npy  a label with pairs of id and value; TFRecords and .npy as written by this command
  a directory of these     files whose names begin with "test" are reported, not read. A prepared directory
                           provides both splits.

Categories become ids below --table-size by hashing, and numbers x become log1p(x). Rows are shuffled across
all files in two passes. They are ordered by hash, so the result is always the same. Shuffling takes as much
extra disk space as the result.
Broken rows are left out and listed in DST/problems.tsv.

examples:
  ringdance data prepare criteo /data/kaggle/train.txt /fast/criteo --validation 0.1 --shards 64
  ringdance data prepare criteo day_{0..22}.gz /fast/criteo --validation day_23.gz --table-size 40000000
  ringdance data prepare criteo /fast/criteo /fast/criteo-tfrecords --format tfrecord
""" + _RESUMED
_PREPARE_COCO = """\
SRC has COCO's layout: SRC/annotations/instances_SPLIT.json, with the images in SRC/SPLIT. DST gets the same
layout: the annotations without broken entries, and a link to the images, which are not changed. The recipe
`detection` can train on SRC or DST.

The following are left out and listed with the reason in DST/SPLIT.problems.tsv: images that are missing,
cannot be decoded, or differ from their stated size, together with all their annotations; boxes without area
or outside the image; polygons that do not consist of three or more pairs of numbers (smaller polygons next to
valid ones are dropped) or that lie far outside the image; run lengths for a different number of pixels;
unknown categories or images; entries with the same id as an earlier entry. Empty outlines are ignored. As in
COCO's own tools, EXIF rotation is not applied. Results of earlier calls in DST are replaced.

examples:
  ringdance data prepare coco /data/coco /fast/coco
  ringdance data prepare coco /data/coco /fast/coco --split train2017

exit code: 0; 3 if broken items were left out; 2 on errors"""
_VERIFY = """\
Compares the sizes and CRC-32C checksums of all files with the index, and the index with its own checksum.
With --decode, it also decodes every image, or parses every row of click logs.

example:
  ringdance data verify /fast/imagenet --decode

exit code: 0 if everything is correct, otherwise 1"""
_INDEX = """\
Writes DIR/SPLIT.json and DIR/SPLIT.npy and changes no other files. DIR can then be used like any data set.
TFRecords need an image in image/encoded (or image) and a label in image/class/label (or label), as written
by TensorFlow's scripts and TFDS. Tars need KEY.jpg (or another image) with KEY.cls, or KEY.json with "label".
The file names decide the split: train, validation or test. Unusable samples are left out, counted, and
listed in DIR/SPLIT.problems.tsv. It is an error if a file named *.tar or *.tfrecord has another format.

examples:
  ringdance data index /data/imagenet-tfrecords
  ringdance data index /data/shards --split train --files 'part-*.tar'

exit code: 0; 3 if samples were left out; 2 on errors"""

_GENERATE = """\
Generates rows like Criteo's: 13 numbers, 26 columns of 3 to 10 million categories that follow a power law,
and missing values. Clicks (a quarter of the rows) are drawn with a known probability that depends on single
columns and on pairs of columns, so a factorization machine does better than a linear model. The command
prints the AUC of this probability. No model can achieve a better AUC on these rows. For other formats or more
files, pass DST to `ringdance data prepare criteo`.

example:
  ringdance data generate criteo /fast/generated --rows 2000000 --validation 0.1"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance data`` with the arguments ``argv``. Returns the exit code."""
    return subcommands.run("ringdance data", _DESCRIPTION, _SUBCOMMANDS, argv, _EPILOG)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(metavar="DATASET", title="commands", required=True)
    for name, help, add, run, epilog in (
        ("imagenet", "ImageNet or images in other class directories", _add_images, prepare.prepare, _PREPARE),
        ("criteo", "click logs, also in LibSVM or TFRecords", _add_clicks, criteo.prepare, _PREPARE_CLICKS),
        ("coco", "images with boxes and masks, in COCO's format", _add_coco, coco.prepare, _PREPARE_COCO),
    ):
        subparser = group.add_parser(name, help=help, description=f"Prepare {help}.", epilog=epilog)
        add(subparser)
        subparser.add_argument("destination", type=_absolute, metavar="DST", help="directory of the data set")
        subparser.set_defaults(prepare=run)


def _absolute(text: str) -> Path:
    """Convert ``text`` to an absolute path, because it is stored in plans and shown in error messages."""
    return Path(text).absolute()


def _add_images(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=_absolute, metavar="SRC", help="directory that contains the images or tars; see below")
    add("--format", choices=tuple(ENDINGS), default="tfrecord", help="default: tfrecord")
    text = "number of files for train; validation gets an eighth as many (default: about 134 MB per file)"
    add("--shards", type=positive, default=0, metavar="N", help=text)
    text = "shrink larger images so that the shorter side has S pixels, and encode them with quality 95"
    add("--resize", type=positive, default=0, metavar="S", help=text)
    text = "prepare only this split (default: all); if SRC has no splits, name of its split (default: train)"
    add("--split", choices=tuple(SPLITS), action="append", default=[], help=text)
    add("--labels", type=Path, metavar="FILE", help="validation labels (default: search near the images)")
    text = "maximum number of broken images to leave out (default: one in 100)"
    add("--max-broken", type=int, metavar="N", help=text)
    add("--overwrite", action="store_true", help="remove the prepared splits from DST and start again")
    _add_processes(parser)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    text = "number of processes (default: number of usable cores)"
    add = parser.add_argument
    add("-np", "--num-proc", type=positive, default=usable_cores(), metavar="N", help=text)


def _add_coco(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=_absolute, metavar="SRC", help="directory in COCO's layout; see below")
    text = "prepare only this split, such as train2017 (default: all in SRC/annotations)"
    add("--split", action="append", default=[], metavar="SPLIT", help=text)
    text = "maximum number of broken items to leave out of a split (default: one in 100 annotations)"
    add("--max-broken", type=int, metavar="N", help=text)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="data set directory")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument("--decode", action="store_true", help="also decode every image or parse every row")


def _add_index(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    add = parser.add_argument
    add("--split", default="", help="put all files in this split (default: split by file names)")
    add("--files", default="*", metavar="PATTERN", help="files to index (default: all TFRecords or tars)")
    text = "number of the first class (default: 1 for image/class/label if 0 does not occur, otherwise 0)"
    add("--first-label", type=int, choices=(0, 1), help=text)


_share = at_least(float, 0, 1)


def _share_or_path(text: str) -> float | Path:
    try:
        return _absolute(text) if os.path.exists(text) else _share(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an existing file or directory nor a number from 0 to 1"
        ) from None


def _add_clicks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "files, or a directory that contains them; see below"
    add("source", type=_absolute, nargs="+", metavar="SRC", help=text)
    text = "default: rows, which training can read without parsing"
    add("--format", choices=tuple(ENDS), default="rows", help=text)
    add("--shards", type=positive, default=0, metavar="N", help="files for train (default: 268 MB per file)")
    _add_table_size(parser)
    text = "validation rows: a share of all rows, such as 0.1, or files (default: none)"
    add("--validation", type=_share_or_path, default=0.0, metavar="SHARE|SRC", help=text)
    add("--max-broken", type=int, metavar="N", help="maximum number of broken rows (default: one in 100)")
    add("--chunk", type=float, default=0, help=argparse.SUPPRESS)  # in MB; used only by tests
    add("--overwrite", action="store_true", help="remove the data set in DST and start again")
    _add_processes(parser)


def _add_table_size(parser: argparse.ArgumentParser) -> None:
    text = "rows in the embedding table; all ids are below this number (default: 1000000)"
    parser.add_argument("--table-size", type=positive, default=1_000_000, metavar="H", help=text)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dataset", choices=("criteo",), help="data set whose columns to generate")
    add("destination", type=Path, metavar="DST", help="directory of the data set")
    add("--rows", type=positive, default=2_000_000, metavar="N", help="rows in all splits (default: 2000000)")
    text = "day number; days have different rows, but the same click probabilities (default: 0)"
    add("--day", type=int, default=0, metavar="N", help=text)
    _add_table_size(parser)
    text = "share of the rows for the validation split, such as 0.1 (default: none)"
    add("--validation", type=_share, default=0.0, metavar="SHARE", help=text)
    add("--overwrite", action="store_true", help="replace the data set in DST")


_SUBCOMMANDS = {
    "prepare": Subcommand(
        lambda arguments: LEFT_OUT * bool(arguments.prepare(arguments)),
        "write images or click logs to files for training, with an index", _add_prepare,
    ),
    "verify": Subcommand(
        lambda arguments: inspect.verify(arguments.directory, arguments.decode),
        "check the files of a data set", _add_verify, _VERIFY,
    ),
    "info": Subcommand(
        lambda arguments: inspect.info(arguments.directory),
        "show splits, samples or rows, classes and bytes", _add_directory,
    ),
    "index": Subcommand(
        lambda arguments: LEFT_OUT * bool(index(arguments)),
        "write an index for TFRecords or tars from other tools", _add_index, _INDEX,
    ),
    "generate": Subcommand(
        generate, "write click logs whose best possible AUC is known", _add_generate, _GENERATE
    ),
}  # fmt: skip
