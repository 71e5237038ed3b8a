"""The model `mmrec` of lm-evaluation-harness (docs/harness.md): python -m mmrec.lm_eval run --model mmrec ...

The harness has no plugins: importing this module registers the model. As a program it is the harness's own command line
with the model registered. Must stay true: figures are those of mmrec-ppl on the same text; a document is scored whole
in one pass; the result of a request does not depend on the requests scored with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from typing import Any, Iterable, Iterator, Optional

import numpy as np
import numpy.typing as npt
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry
from lm_eval.utils import simple_parse_args_string

from . import _mmrec
from ._generator import Generator
from ._methods import Scorer, blocks_of, load_models

Ids = npt.NDArray[np.int32]

#: Tokens of context that each of several continuations must save before the state is branched, by device: below it,
#: packing whole documents together is faster than scoring the continuations one by one.
BRANCH_TOKENS = {"cpu": 12, "cuda": 2048}
#: Tokens that prompts must share before they start from one state.
SHARED_TOKENS = 32
#: PyTorch's names of precisions.
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
#: Options of Hugging Face's generate() that this value, or any (None), leaves without effect, as null leaves all.
_WITHOUT_EFFECT: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "early_stopping": False,
    "length_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "use_cache": None,
    "pad_token_id": None,
}


class RefusedOptionError(ValueError):
    """An option of the harness that these models cannot follow, in one line."""


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Makes an error in a value of the harness a RefusedOptionError that begins with `what`."""
    try:
        yield
    except RefusedOptionError:
        raise
    except (TypeError, ValueError) as fault:
        raise RefusedOptionError(f"{what}: {fault}") from fault


def _number(kind: type, name: str, value: Any) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise RefusedOptionError(f"gen_kwargs: {name}: found {value!r}, expected a number") from None


class _Pair:
    """A context and a continuation in tokens, and its result."""

    def __init__(self, ids: Ids, context: int) -> None:
        self.ids = ids
        self.context = context
        self.loglikelihood = 0.0
        self.greedy: Optional[bool] = None

    @property
    def tokens(self) -> Ids:
        return self.ids[self.context :]


class MMRecLM(LM):  # type: ignore[misc,unused-ignore]
    """--model_args path=DIR,device=cuda: `path` or `pretrained` (the bundled model), `device` (auto, cpu, cuda, cuda:N,
    cuda:all), `precision` or `dtype`, `threads`, `batch` (requests scored together; 0: as many as suit the device),
    `max_gen_toks` (256) where a task gives none, `max_length` (tokens that a request keeps; none: all), `add_bos_token`
    (the tokenizer's way). batch_size and trust_remote_code say nothing: requests are always packed, and a model folder
    holds no code."""

    def __init__(
        self,
        path: Optional[str] = None,
        pretrained: Optional[str] = None,
        device: Optional[str] = None,
        precision: str = "auto",
        dtype: Optional[str] = None,
        threads: int = 0,
        batch: int = 0,
        max_gen_toks: int = 256,
        max_length: Optional[int] = None,
        add_bos_token: Optional[bool] = None,
        trust_remote_code: Any = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        folder = path if path is not None else pretrained
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            precision = _DTYPES.get(name, name)
        load = functools.partial(
            load_models,
            None if folder is None else os.fspath(folder),
            device or "auto",
            precision=precision,
            threads=int(threads),
        )
        self._models = load()
        info = self._models[0].info
        if info.bank and info.calls != "stepwise":
            # If a prompt were one call, the beginning that prompts share could not be computed once for all.
            del self._models
            self._models = load(calls="stepwise")
        self._model = self._models[0]
        self.tokenizer = _mmrec.Tokenizer.load(folder)
        self._threads = int(threads)
        self._session_options: dict[str, Any] = {"threads": self._threads}
        self._scorer = Scorer(self._models, batch=int(batch), **self._session_options)
        self.max_gen_toks = int(max_gen_toks)
        self.max_length = None if max_length is None else int(max_length)
        if self.max_length is not None and self.max_length < 1:
            raise RefusedOptionError(f"max_length: found {max_length}, expected at least 1")
        self._add_bos = self.tokenizer.adds_bos if add_bos_token is None else bool(add_bos_token)
        if self._add_bos and self.tokenizer.bos_id < 0:
            raise RefusedOptionError("add_bos_token: the tokenizer has no BOS")
        self.batch_size = batch_size

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: Optional[dict[str, Any]] = None
    ) -> MMRecLM:
        """model_args come before the harness's options of the same name. Its --device is cuda:0 where none is given."""
        known = list(inspect.signature(cls).parameters)
        if unknown := sorted(arg_dict.keys() - set(known)):
            raise RefusedOptionError(f"model_args: found {', '.join(unknown)}, expected some of {', '.join(known)}")
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if given.get("device") == "cuda:0":
            given["device"] = "auto"
        try:
            with _refusing("model_args"):
                return cls(**{**given, **arg_dict})
        except OSError as fault:
            raise _mmrec.ModelError(f"{fault.filename}: {fault.strerror}") from fault

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Optional[dict[str, Any]] = None) -> MMRecLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def tokenizer_name(self) -> str:
        return f"mmrec-{self.tokenizer.fingerprint:016x}"

    def get_model_info(self) -> dict[str, Any]:
        info = self._model.info
        return {
            "model_num_parameters": info.parameters,
            "model_dtype": info.precision,
            "model_device": info.device_name,
            "model_fingerprint": f"{info.fingerprint:016x}",
            "tokenizer_fingerprint": f"{self.tokenizer.fingerprint:016x}",
            "mmrec_version": _mmrec.__version__,
        }

    def chat_template(self, chat_template: Any = False) -> Optional[str]:
        if chat_template:
            raise RefusedOptionError("--apply_chat_template: the models have no chat template")
        return None

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        raise RefusedOptionError("--apply_chat_template: the models have no chat template")

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for block in blocks_of(requests):
            texts = [request.args for request in block]
            try:
                encoded = _mmrec.encode_pairs(self.tokenizer, texts, self._add_bos, self.max_length or 0, self._threads)
            except ValueError as fault:
                raise RefusedOptionError(str(fault)) from fault
            pairs = [_Pair(*tokens) for tokens in encoded]
            self._score(pairs)
            self._decode([pair for pair in pairs if pair.greedy is None])
            for request, pair in zip(block, pairs):
                result = (pair.loglikelihood, bool(pair.greedy))
                self.cache_hook.add_partial("loglikelihood", request.args, result)
                results.append(result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Each document whole, its first token given the prefix token; in windows of `max_length` tokens if given."""
        results: list[float] = []
        mode = "full" if self.max_length is None else "rolling"
        for block in blocks_of(requests, lambda request: len(request.args[0])):
            documents = _mmrec.encode_rolling(self.tokenizer, [request.args[0] for request in block], self._threads)
            windows = [_mmrec.windows(ids, mode, self.max_length or 0) for ids in documents]
            scores = iter(self._scorer.score([ids for document in windows for ids, _ in document]))
            for request, document in zip(block, windows):
                total = 0.0
                for ids, scored in document:
                    values = next(scores).logprobs[len(ids) - 1 - scored :]
                    total += _mmrec.score_pair(values, self._model.info.vocab_size)[0]
                results.append(total)
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        seed = int(np.random.randint(0, 1 << 62, dtype=np.int64))  # follows from the harness's --seed
        for indices in groups.values():
            options = {"seed": seed, **self._generate_options(requests[indices[0]].args[1])}
            prompts = self._prompts([requests[index].args[0] for index in indices])
            if self.max_length is not None:
                kept = self.max_length - options["max_tokens"]
                if kept < 1:
                    raise RefusedOptionError(f"max_length: found {self.max_length}, expected more than max_gen_toks")
                prompts = [prompt[-kept:] for prompt in prompts]
            with _refusing("gen_kwargs"):
                found = self._generate(prompts, options)
            for index, text in zip(indices, found):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    # Scoring

    def _score(self, pairs: list[_Pair]) -> None:
        packed: list[_Pair] = []
        for group in _by_context(pairs):
            saved = (len(group) - 1) * group[0].context // len(group)
            # Packed, all devices share the work.
            if saved < BRANCH_TOKENS[self._model.info.device] * len(self._models):
                packed.extend(group)
            else:
                self._branch(group)
        for pair, score in zip(packed, self._scorer.score([pair.ids for pair in packed])):
            self._take(pair, score.logprobs[pair.context - 1 :])

    def _branch(self, group: list[_Pair]) -> None:
        """The context once, and each continuation from a copy of its state."""
        session = self._model.new_session(**self._session_options)
        session.prefill(group[0].ids[: group[0].context])
        for pair in group:
            self._take(pair, session.clone().score(pair.tokens) if len(pair.tokens) else np.empty(0, np.float32))

    def _take(self, pair: _Pair, logprobs: npt.NDArray[np.float32]) -> None:
        """Gives the pair the log-probs of its continuation."""
        pair.loglikelihood, pair.greedy = _mmrec.score_pair(logprobs, self._model.info.vocab_size)

    def _decode(self, pairs: list[_Pair]) -> None:
        """Greedy decoding from each context, once for all of its continuations, while it agrees with one of them."""
        for group in _by_context(pairs):
            for pair in group:
                pair.greedy = True
            self._generator.submit(
                group[0].ids[: group[0].context],
                temperature=0.0,
                max_tokens=max(len(pair.tokens) for pair in group),
                eos_token_ids=(),
                logprobs=False,
                on_token=_follower(group),
                on_finish=_raise_error,
            )
        self._generator.run()

    # Generating

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self._models, self.tokenizer, **self._session_options)

    def _prompts(self, texts: list[str]) -> list[Ids]:
        found = self.tokenizer.encode_batch(texts, False, self._threads)
        if self._add_bos:
            first = np.asarray([self.tokenizer.bos_id], np.int32)
            return [np.concatenate([first, ids]) for ids in found]
        return [
            ids if len(ids) else _mmrec.encode_rolling(self.tokenizer, [text])[0] for ids, text in zip(found, texts)
        ]

    def _generate_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """The harness's gen_kwargs as options of Session.generate. Raises RefusedOptionError for an unknown one."""
        left = {name: value for name, value in given.items() if value is not None}
        for name, neutral in _WITHOUT_EFFECT.items():
            if name in left and neutral in (None, left[name]):
                del left[name]
        until = left.pop("until", [])
        stops = [until] if isinstance(until, str) else until
        if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
            raise RefusedOptionError(f"gen_kwargs: until: found {until!r}, expected a string or a list of strings")
        most = self.max_gen_toks
        for name in ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_gen_toks"):
            most = _number(int, name, left.pop(name, most))
        temperature = left.pop("temperature", None)
        sampled = left.pop("do_sample", bool(temperature))
        options: dict[str, Any] = {
            "stop": [stop for stop in stops if stop],
            "max_tokens": most,
            "temperature": (1.0 if temperature is None else _number(float, "temperature", temperature)) if sampled else 0.0,
            **{name: off for name, _, off, _ in _mmrec.sampler_options if off is not None},
            "logprobs": False,
        }
        for name, _, _, text in _mmrec.sampler_options:
            if text is not None and name in left:
                options[name] = left.pop(name)
        if left:
            found = ", ".join(f"{name}={value}" for name, value in sorted(left.items()))
            raise RefusedOptionError(f"gen_kwargs: found {found}, which mmrec does not know")
        return options

    def _generate(self, prompts: list[Ids], options: dict[str, Any]) -> list[str]:
        shared = _shared(prompts)
        if len(prompts) > 1 and shared >= SHARED_TOKENS:
            options["start"] = self._model.new_session(**self._session_options)
            options["start"].prefill(prompts[0][:shared])
            prompts = [prompt[shared:] for prompt in prompts]
        results = self._generator.generate(prompts, **options)
        for result in results:
            _raise_error(result)
        return [result.text for result in results]


def _by_context(pairs: Iterable[_Pair]) -> list[list[_Pair]]:
    groups: dict[bytes, list[_Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.ids[: pair.context].tobytes(), []).append(pair)
    return list(groups.values())


def _follower(group: list[_Pair]) -> Any:
    """on_token: a continuation is greedy while its tokens are those drawn. Goes on while one of them may be greedy."""
    at = 0

    def follow(token: int, _: float) -> bool:
        nonlocal at
        more = False
        for pair in group:
            if pair.greedy and at < len(pair.tokens):
                pair.greedy = int(pair.tokens[at]) == token
                more = more or (bool(pair.greedy) and at + 1 < len(pair.tokens))
        at += 1
        return more

    return follow


def _raise_error(result: Any) -> None:
    if result.finish_reason == "error":
        raise _mmrec.NumericError(result.error)


def _shared(prompts: list[Ids]) -> int:
    """The length of the longest common beginning that leaves at least one token of each prompt."""
    first, last = min(prompts, key=lambda ids: ids.tolist()), max(prompts, key=lambda ids: ids.tolist())
    most = min(min(len(prompt) for prompt in prompts) - 1, len(first), len(last))
    different = np.flatnonzero(first[:most] != last[:most])
    return int(different[0]) if len(different) else most


if "mmrec" not in model_registry:
    model_registry.register("mmrec", target="mmrec.lm_eval:MMRecLM")


_EXIT_CODES = {RefusedOptionError: 2, _mmrec.ModelError: 3, _mmrec.NumericError: 6, _mmrec.DeviceUnavailable: 1}


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except tuple(_EXIT_CODES) as fault:
        print(f"mmrec.lm_eval: {fault}", file=sys.stderr)
        sys.exit(_EXIT_CODES[type(fault)])


if __name__ == "__main__":
    from mmrec.lm_eval import main as run_main  # whose errors are those that the registered model raises

    run_main()
