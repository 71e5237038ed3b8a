"""Tokenizer files of a folder: a sentencepiece model, or a rank file of tiktoken with its configuration.

A file is looked at as far as it takes to count its tokens: one with more than the model has rows belongs to another model.
The engine checks the rest when it loads the folder.
"""
import base64
import binascii
import json
import os

from .common import Rejected, one_line, read_file

MAX_BYTES = 64 << 20  # of the tokenizer, as the engine has it
MAX_CONFIG_BYTES = 16 << 20
MAX_RANK_DIGITS = 9

# tiktoken's cl100k_base, which MM-Rec's own scripts train with. Its rank file says neither.
CL100K_RANKS = 100256
CL100K_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
                  r"|\s+")
CL100K_SPECIAL = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
                  "<|endofprompt|>": 100276}


def varint(data, at):
    """(value, where it ends) of a protobuf's number."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def count_pieces(data):
    """Pieces of a sentencepiece ModelProto: its messages number 1. None if it is none."""
    at = pieces = 0
    try:
        while at < len(data):
            key, at = varint(data, at)
            kind = key & 7
            if kind == 0:
                _, at = varint(data, at)
            elif kind == 2:
                size, at = varint(data, at)
                at += size
                pieces += key >> 3 == 1
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                return None
    except IndexError:
        return None
    return pieces if at == len(data) and pieces > 0 else None


def highest_rank(data):
    """The highest rank of tiktoken's lines of base64 and rank. None if they are not that."""
    highest = None
    for line in data.splitlines():
        if not line:
            continue
        parts = line.split()
        try:
            base64.b64decode(parts[0], validate=True)
            rank = int(parts[1][:MAX_RANK_DIGITS + 1])
        except (IndexError, ValueError, binascii.Error):
            return None
        if len(parts) != 2 or rank < 0:
            return None
        highest = rank if highest is None else max(highest, rank)
    return highest


def refuse_more(path, tokens, vocab_size):
    if tokens > vocab_size:
        raise Rejected(f"{one_line(path)}: found {tokens} tokens, expected at most the {vocab_size} rows of the model's embedding")


def read_tokenizer(path, vocab_size):
    """The files that make it the folder's: bytes by name. Raises Rejected, OSError."""
    data = read_file(path, MAX_BYTES)
    pieces = count_pieces(data)
    if pieces is not None:
        refuse_more(path, pieces, vocab_size)
        return {"tokenizer.model": data}
    rank = highest_rank(data)
    if rank is None:
        raise Rejected(f"{one_line(path)}: found neither a sentencepiece model nor a rank file of tiktoken")
    refuse_more(path, rank + 1, vocab_size)
    beside = os.path.join(os.path.dirname(path) or ".", "tokenizer_config.json")
    if os.path.lexists(beside):
        config = read_file(beside, MAX_CONFIG_BYTES)
    elif rank + 1 == CL100K_RANKS:
        special = {text: number for text, number in CL100K_SPECIAL.items() if number < vocab_size}
        config = (json.dumps({"pattern": CL100K_PATTERN, "special_tokens": special}, indent=2) + "\n").encode()
    else:
        raise Rejected(f"{one_line(path)}: {rank + 1} ranks are not those of cl100k_base; expected a tokenizer_config.json with their "
                       "pattern and special_tokens beside the file")
    return {"tokenizer.tiktoken": data, "tokenizer_config.json": config}
