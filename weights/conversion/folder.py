"""Writes a model folder: config.json, the weights in one safetensors file or several, and the tokenizer.

What must stay true: the folder appears whole or not at all. It is written beside its place under another name, then renamed.
"""
import json
import os
import shutil
import signal
import struct
import tempfile

from .common import CannotWrite
from .dtypes import WEIGHT_DTYPES, converted


def shards_of(selected, dtype, max_bytes):
    """Lists of names that share a file, in the order of names."""
    shards, used = [[]], 0
    for name in sorted(selected):
        size = selected[name].elements * WEIGHT_DTYPES[dtype or selected[name].dtype[0]]
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def write_shard(path, names, selected, dtype, source):
    """Writes one safetensors file; returns the bytes of its tensors."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    storages = {}  # those that share one lie together, so that each is read once
    for name in names:
        storages.setdefault(source.storage_of(selected[name]), len(storages))
    names = sorted(names, key=lambda name: storages[source.storage_of(selected[name])])
    for name in names:
        kind = dtype or selected[name].dtype[0]
        begin, end = end, end + selected[name].elements * WEIGHT_DTYPES[kind]
        header[name] = {"dtype": kind, "shape": list(selected[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            tensor = selected[name]
            file.write(converted(source.tensor(tensor), tensor.dtype[0], dtype or tensor.dtype[0], name))
        sync(file)
    return end


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def sync(file):
    file.flush()
    os.fsync(file.fileno())


def write_folder(folder, config, selected, dtype, source, tokenizer, max_bytes):
    """`tokenizer` has the bytes of its files by name."""
    folder = os.path.abspath(folder)
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise CannotWrite(f"{folder}: exists and is not an empty folder")
    # A signal between the making of the folder and the try would leave the folder behind.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        temporary = tempfile.mkdtemp(prefix="." + os.path.basename(folder) + ".", dir=os.path.dirname(folder))
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        shards = shards_of(selected, dtype, max_bytes)
        if len(shards) == 1:
            write_shard(os.path.join(temporary, "model.safetensors"), shards[0], selected, dtype, source)
        else:
            total, weight_map = 0, {}
            for i, names in enumerate(shards):
                shard = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                total += write_shard(os.path.join(temporary, shard), names, selected, dtype, source)
                weight_map.update(dict.fromkeys(names, shard))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text(os.path.join(temporary, "model.safetensors.index.json"), json.dumps(index, indent=2) + "\n")
        write_text(os.path.join(temporary, "config.json"), json.dumps(config, indent=2) + "\n")
        for name, data in tokenizer.items():
            with open(os.path.join(temporary, name), "wb") as file:
                file.write(data)
                sync(file)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o777 & ~mask)  # mkdtemp made it private
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
