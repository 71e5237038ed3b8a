"""Results of calls, as dataclasses that can be pickled, and what the extension leaves to Python: token ids, errors of
the system, the bundled model, pickles."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Optional

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Sizes and identity of a loaded model, and where it runs."""

    architecture: str  #: model_type of config.json
    vocab_size: int  #: V: ids are 0..V-1
    model_dim: int  #: D: of the hidden state
    num_layers: int  #: blocks
    num_heads: int  #: of attention
    ffn_dim: int  #: width of the feed-forward network
    memory_segment: int  #: tokens of a segment; 0: there is no memory of segments
    memory_slots: int  #: segments that are remembered
    expert: Optional[str]  #: of mmrec100m "both", "text" or "code", else None
    calls: Optional[str]  #: of mmrec-jax "stepwise", "prompt" or "whole", else None
    bank: Optional[bool]  #: of mmrec-jax whether a memory bank is written, else None
    parameters: int  #: numbers in the weights
    weight_bytes: int  #: resident bytes of the weights
    bytes_per_token: int  #: weight bytes that one decoded token reads
    memory_bytes: int  #: those it reads besides once attention has several memory slots to choose from
    fingerprint: int  #: identity of configuration and weights, as saved states carry it
    bos_token_id: int  #: from config.json; -1: not given there
    eos_token_ids: tuple[int, ...]  #: from config.json; empty: not given there
    device: str  #: "cpu" or "cuda"
    gpu: int  #: the GPU's number; -1 on the CPU
    device_name: str  #: "NVIDIA H200"; "cpu" on the CPU
    precision: str  #: of products: "fp32", "fp16", "bf16" or "fp32-fma"
    batch_invariant: bool  #: the option of load(), on a GPU


@dataclasses.dataclass(frozen=True)
class PrefillStats:
    """The cost of prefilling."""

    layer_tokens: int  #: tokens × layers × sequences that were swept
    token_sweeps: int  #: sum over these of the sweeps each took part in
    windows: int  #: windows swept, one layer each
    fallbacks: int  #: windows that did not converge and were finished by steps

    @property
    def sweeps_per_token(self) -> float:
        """token_sweeps / layer_tokens; 0 where nothing was swept."""
        return self.token_sweeps / self.layer_tokens if self.layer_tokens else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class GenerateResult:
    """The text of a request, and why it ended."""

    text: str  #: as on_text received it
    tokens: npt.NDArray[np.int32]  #: [T] drawn, end of sequence excluded; may reach past `text` at a stop string
    logprobs: npt.NDArray[np.float32]  #: [T] under the model's own distribution, in nats; [0] if not wanted
    top_tokens: Optional[
        npt.NDArray[np.int32]
    ]  #: [T, K] the likeliest at each place, likeliest first; None: not wanted
    top_logprobs: Optional[npt.NDArray[np.float32]]  #: [T, K] their log-probs
    finish_reason: str  #: "length", "eos", "stop", "cancelled" or "error"
    error: str  #: the reason of "error"


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentScore:
    """Log-probs of one document."""

    logprobs: npt.NDArray[np.float32]  #: of tokens 1..T-1 given all before, in nats; empty for T < 2
    nll: float  #: their negated sum, in order in float64
    complete: bool  #: whether all of its tokens were scored


@dataclasses.dataclass(frozen=True)
class PerplexitySummary:
    """Measures of a corpus as lm-evaluation-harness defines them; NaN without a denominator."""

    docs: int  #: documents, those without a token to score among them
    tokens: int  #: scored tokens
    nll: float  #: summed negative log-likelihood, in nats
    ppl: float  #: exp(nll / tokens)
    ppl_stderr: float  #: standard error of ppl from the spread of per-token log-probs
    bytes: int  #: of the original input
    words: int  #: fields of re.split(r"\\s+", document)
    bits_per_byte: float  #: nll / bytes / ln 2
    word_ppl: float  #: exp(nll / words)
    byte_ppl: float  #: exp(nll / bytes)
    nll_m2: float  #: summed squares of the deviations of tokens' losses from their mean


def ids_of(value: Any, what: str) -> npt.NDArray[np.int32]:
    """Token ids of anything that NumPy converts, in their shape. Raises TypeError, and ValueError beyond 32 bits."""
    array = np.asarray(value)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: found {array.dtype.name}, expected integers")
    if array.size and not (-(1 << 31) <= int(array.min()) and int(array.max()) < 1 << 31):
        raise ValueError(f"{what}: found an integer that is no token id (beyond 32 bits)")
    return np.ascontiguousarray(array, np.int32).reshape(array.shape)


def os_error(number: int, reason: str, message: bytes) -> OSError:
    """The engine's "PATH: what: reason" as an OSError."""
    path, colon, what = message.removesuffix(f": {reason}".encode()).rpartition(b": ")
    text = f"{what.decode('utf-8', 'replace')}: {reason}" if colon else reason
    return OSError(number, text, os.fsdecode(path if colon else what))


def bundled_model() -> pathlib.Path:
    """The folder of the model that travels with the package: 12 million parameters, English (weights, tokenizer)."""
    return pathlib.Path(__file__).resolve().parent / "models" / "mmrec-12m"


def load_again(kind: Any, path: pathlib.Path, options: dict[str, Any], fingerprint: int) -> Any:
    """A pickled Model or Tokenizer, as `kind` says. Raises ModelError where `path` holds another one now."""
    from . import _mmrec

    loaded = kind.load(path, **options)
    if getattr(loaded, "info", loaded).fingerprint != fingerprint:
        raise _mmrec.ModelError(f"{path}: found another {kind.__name__.lower()} than the one that was pickled")
    return loaded
