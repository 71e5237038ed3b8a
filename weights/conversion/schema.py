"""What config.json may hold: docs/schemas/config.schema.json, by which the programs' documents and tests go too."""
import json
import math
import pathlib

from .common import Rejected

SCHEMA = pathlib.Path(__file__).resolve().parents[2] / "docs/schemas/config.schema.json"
KINDS = {"integer": lambda v: type(v) is int, "number": lambda v: type(v) in (int, float), "boolean": lambda v: type(v) is bool,
         "null": lambda v: v is None, "array": lambda v: type(v) is list, "string": lambda v: type(v) is str}


def fits(value, rule):
    """Whether a value is what a rule of the schema allows; of JSON Schema what that file uses."""
    kinds = rule.get("type", [])
    if kinds and not any(KINDS[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if type(value) in (int, float):
        if not rule.get("minimum", -math.inf) <= value <= rule.get("maximum", math.inf):
            return False
        if value % rule.get("multipleOf", 1) != 0 and "multipleOf" in rule:
            return False
    if type(value) is list and (len(value) > rule.get("maxItems", len(value))
                                or not all(fits(item, rule.get("items", {})) for item in value)):
        return False
    if "const" in rule and (value != rule["const"] or type(value) is not type(rule["const"])):
        return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    return "anyOf" not in rule or any(fits(value, one) for one in rule["anyOf"])


def expected(rule):
    if "const" in rule or "enum" in rule:
        return " or ".join(json.dumps(value) for value in rule.get("enum", [rule.get("const")]))
    if "anyOf" in rule:
        return " or ".join(expected(one) for one in rule["anyOf"])
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    bounds = f" of {rule['minimum']} to {rule['maximum']}" if "minimum" in rule else ""
    return " or ".join(kind + bounds * (kind in ("integer", "number")) for kind in kinds)


def check_config(config):
    """Refuses what the programs would refuse of a config.json's values, one by one."""
    try:
        rules = json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"][config["model_type"]]["properties"]
    except OSError as error:
        raise Rejected(f"{SCHEMA}: {error.strerror}: convert.py goes by this file of the source tree") from None
    for key, rule in rules.items():
        if key in config and not fits(config[key], rule):
            raise Rejected(f"{key}: found {config[key]!r}, expected {expected(rule)}")
    for key in ("bos_token_id", "eos_token_id"):
        ids = config[key] if isinstance(config.get(key), list) else [config.get(key)]
        if any(token is not None and token >= config["vocab_size"] for token in ids):
            raise Rejected(f"{key}: found {config[key]!r}, expected ids below vocab_size {config['vocab_size']}")
