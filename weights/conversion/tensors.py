"""What all models share in choosing tensors and settings: shapes that are checked, values that are of their kind.

A tensor is anything with shape, elements and dtype, a pair of name and bytes per element.
"""
import math
import re

from .common import Rejected
from .dtypes import WEIGHT_DTYPES

TOKEN_IDS = ("bos_token_id", "eos_token_id")


def shape_of(tensors, name, rank):
    if name not in tensors:
        raise Rejected(f"{name}: tensor is missing (is this a checkpoint of MM-Rec?)")
    shape = tensors[name].shape
    if len(shape) != rank or 0 in shape:
        raise Rejected(f"{name}: found shape {list(shape)}, expected {rank} dimensions of at least 1")
    return shape


def layer_count(tensors, prefix):
    """How many numbers, from 0 on and without a gap, follow the prefix in the tensors' names."""
    numbered = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]{0,5})\.")
    layers = {int(m.group(1)) for m in map(numbered.match, tensors) if m}
    if layers != set(range(len(layers))) or not layers:
        raise Rejected(f"{prefix}N: found numbers {sorted(layers)[:8]}, expected 0, 1, 2, ...")
    return len(layers)


def select_tensors(tensors, specs, may_have_more_rows=lambda name: False):
    """The tensors to write, by name, of (name, shape, required); the others' names."""
    selected = {}
    for name, shape, required in specs:
        tensor = tensors.get(name)
        if tensor is None:
            if required:
                raise Rejected(f"{name}: tensor is missing (expected shape {list(shape)})")
            continue
        found = tuple(tensor.shape)
        if may_have_more_rows(name) and len(found) == len(shape) and found[0] > shape[0]:
            found = (shape[0],) + found[1:]
        if found != shape:
            raise Rejected(f"{name}: found shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype[0] not in WEIGHT_DTYPES:
            raise Rejected(f"{name}: found {tensor.dtype[0]}, expected F32, F16 or BF16")
        selected[name] = tensor
    return selected, sorted(set(tensors) - set(selected))


def is_plain(value):
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (bool, int, str, type(None))) or (
        isinstance(value, list) and all(type(item) is int for item in value))


def are_token_ids(value, vocab_size):
    ids = value if isinstance(value, list) else [value]
    return bool(ids) and all(type(token) is int and 0 <= token < vocab_size for token in ids)


def check_heads(heads, width_name, width):
    if type(heads) is not int or heads < 1 or width % heads:
        raise Rejected(f"num_heads: found {heads!r}, expected a divisor of {width_name} {width}")


def expect(settings, key, allowed, expected):
    """Refuses a setting that is there and not allowed."""
    if key in settings and not allowed(settings[key]):
        raise Rejected(f"{key}: found {settings[key]!r}, expected {expected}")


def given_settings(given, model_type, inferred):
    """The file of --config, which must be of this model; what the shapes tell must not be contradicted. Null says nothing."""
    given = {key: value for key, value in given.items() if value is not None}
    expect(given, "model_type", lambda value: value == model_type, repr(model_type))
    for key, value in inferred.items():
        if key in given and (given[key] != value or type(given[key]) is not int):
            raise Rejected(f"{key}: found {given[key]!r} in --config, expected {value!r} by the tensors' shapes")
    for key in TOKEN_IDS:
        expect(given, key, lambda value: are_token_ids(value, inferred["vocab_size"]), "ids below vocab_size")
    return given


def refuse_unknown(names, is_known):
    """A tensor that the definition does not know may belong to a model that computes something else."""
    unknown = [name for name in names if not is_known(name)]
    if unknown:
        raise Rejected(f"{unknown[0]}: found a tensor that the model does not have")
