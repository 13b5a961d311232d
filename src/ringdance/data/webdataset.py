"""Write tar files for WebDataset, with ``key.jpg`` and ``key.cls`` for each sample."""

from __future__ import annotations

import tarfile

from ringdance.data.files import ShardWriter
from ringdance.data.sample import Sample

_BLOCK = 512


def write(shard: ShardWriter, sample: Sample, key: str) -> int:
    """Append an image and its label. Returns the image's offset in the file."""
    offset = _member(shard, f"{key}.jpg", sample.image)
    _member(shard, f"{key}.cls", str(sample.label).encode())
    return offset


def key_of(sample: Sample) -> str:
    """Return a sample's key, without dots because WebDataset splits file names at the first dot."""
    name = sample.name.rpartition("/")[2].rpartition(".")[0] or sample.name
    directory = f"{sample.synset}/" if sample.synset else ""
    return (directory + name).replace(".", "_")


def end(shard: ShardWriter) -> None:
    """Append the two zero blocks that mark the end of a tar."""
    shard.write(bytes(2 * _BLOCK))


def _member(shard: ShardWriter, name: str, data: bytes) -> int:
    header = tarfile.TarInfo(name)  # without time and owner, so that files are reproducible
    header.size, header.mode = len(data), 0o644
    shard.write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
    offset = shard.size
    shard.write(data)
    shard.write(bytes(-len(data) % _BLOCK))
    return offset
