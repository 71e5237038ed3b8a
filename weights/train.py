#!/usr/bin/env python3
"""Trains, evaluates and exports the bundled model `mmrec-12m`.

One file, one GPU.  Subcommands, in the order they are used:

  tokenizer   train the sentencepiece model on a sample of both text forms
  prepare     render one text file as documents, encode it, write uint16 tokens
  selftest    check the recurrence's forward and gradient against a plain step loop
  train       train for a given wall time; writes fp32 checkpoints
  evaluate    bits per byte of one document, scored as one sequence with carried state
  export      checkpoint -> model folder (bf16 safetensors shards, configs, tokenizer)
  heldout     expected log-probs of an exported folder, for the engine's test
  sample      generate text from an exported folder
  sweeps      count the gate-frozen sweeps that each layer needs

README.md beside this file has the exact commands.  The model is the one that the
engine runs: state-gated recurrence, segment memory, tied embedding.
"""
from __future__ import annotations

import argparse
import copy
import hashlib
import json
import lzma
import math
import multiprocessing
import os
import random
import re
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

try:  # the CPU paths (selftest, heldout, export) need no Triton
    import triton
    import triton.language as tl
except ImportError:
    triton = None

UNK, BOS, EOS = 0, 1, 2

# ---------------------------------------------------------------------------------------
# Text: reading articles, rendering them in WikiText form, tokenizer, token files
# ---------------------------------------------------------------------------------------

# A full stop after these words belongs to the word (the Moses tokenizer's English list,
# abridged); NUMERIC ones only before a number.
NONBREAKING = frozenset(
    "Adj Adm Adv Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con Corp Cpl DR Dr Drs Ens Gen Gov Hon Hr "
    "Hosp Insp Lt MM MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr Op Ord Pfc Ph Prof Pvt Rep Reps Res Rev "
    "Rt Sen Sens Sfc Sgt Sr St Supt Surg v vs i.e rev e.g Nos Ft Mt".split())
NONBREAKING_NUMERIC = frozenset("No Art pp Vol vol p nr".split())

_EMPTY_PARENS = re.compile(r"\(\s*[;,:\s]*\)")
_OPEN_JUNK = re.compile(r"\(\s*[;,:]+\s*")
_SPECIAL = re.compile(r"([^\w\s.',\-])|_")
_DOTS = re.compile(r"\.{2,}")
_NUMBER_SEP = re.compile(r"(?<![\w.,])(\d+(?:[.,]\d+)+)(?![\w]*[A-Za-z])")
_COMMA = re.compile(r"(?<=\D),|,(?=\D)|,$")
_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")
_APOS = [(re.compile(r"(?<![^\W\d_])'(?![^\W\d_])"), " ' "), (re.compile(r"(?<![\w])'(?=[^\W\d_])"), " ' "),
         (re.compile(r"(?<=[^\W\d_])'(?![^\W\d_])"), " ' "), (re.compile(r"(?<=[^\W\d_])'(?=[^\W\d_])"), " '"),
         (re.compile(r"(?<=\d)\s*'\s*s\b"), " 's")]


def clean(paragraph: str) -> str:
    """Removes the empty brackets that template stripping left in the source articles."""
    paragraph = _OPEN_JUNK.sub("(", _EMPTY_PARENS.sub("", paragraph))
    return re.sub(r"  +", " ", paragraph).replace(" ,", ",").strip()


def wikitext_line(text: str) -> str:
    """One paragraph in WikiText's raw form: tokens separated by single spaces, `@-@`, `@,@`, `@.@`."""
    text = _SPECIAL.sub(lambda m: f" {m.group(0)} ", text)
    text = _DOTS.sub(lambda m: f" {m.group(0)} ", text)
    text = _NUMBER_SEP.sub(lambda m: m.group(1).replace(",", " @,@ ").replace(".", " @.@ "), text)
    text = _COMMA.sub(" , ", text).replace("@ , @", "@,@")
    text = _HYPHEN.sub(" @-@ ", text)
    for pattern, replacement in _APOS:
        text = pattern.sub(replacement, text)
    words = text.split()
    out = []
    for i, word in enumerate(words):
        if len(word) > 1 and word.endswith(".") and not word.endswith("..") and word != "@.@":
            stem, after = word[:-1], words[i + 1] if i + 1 < len(words) else ""
            keep = bool(after) and (
                ("." in stem and any(c.isalpha() for c in stem)) or (stem in NONBREAKING and after[0].isalnum())
                or (len(stem) == 1 and stem.isupper()) or after[0].islower()
                or (stem in NONBREAKING_NUMERIC and after[0].isdigit()))
            if not keep:
                out += [stem, "."]
                continue
        out.append(word)
    return " ".join(out)


# The source articles lost their section headings.  WikiText has one every two kilobytes, so
# headings are put back between paragraphs: a usual one where the next paragraph's words
# suggest it, else a name that stands out in it, else a span of its years.
_TOPICS = [(re.compile(p), h) for p, h in [
    (r"\bwas born (in|on|to|at)\b|\bgrew up\b|\bhis (father|parents)\b|\bher (father|parents)\b",
     ["Early life", "Early life", "Biography", "Early life and education", "Background", "Early years", "Life"]),
    (r"\bmarried\b|\bdivorced\b|\bhis wife\b|\bher husband\b", ["Personal life", "Personal life", "Family", "Marriage"]),
    (r"\bdied (in|on|of|at|from)\b|\bburied\b|\bfuneral\b", ["Death", "Later life", "Death and legacy", "Later years"]),
    (r"\breviews?\b|\bcritics?\b|\bpraised\b|\breviewer", ["Reception", "Critical reception", "Reception", "Critical response"]),
    (r"\bchart(s|ed)?\b|\bBillboard\b|\bpeaked at\b", ["Chart performance", "Commercial performance", "Charts", "Release"]),
    (r"\balbum\b|\bsingle\b|\bsongs?\b|\bband\b", ["Background", "Composition", "Music video", "Track listing", "Recording",
                                                   "Release", "Critical reception", "Live performances", "Musical style"]),
    (r"\bepisode\b|\bfilmed\b|\bdirector\b|\bfilming\b|\bscreenplay\b", ["Production", "Plot", "Cast", "Development", "Casting",
                                                                          "Filming", "Release", "Writing"]),
    (r"\bgame(play)?\b.*\bplayers?\b.*\b(characters?|levels?)\b", ["Gameplay", "Development", "Plot", "Reception", "Characters"]),
    (r"\b(season|goals?|scored|league|club|match(es)?|coach)\b", ["Career", "Club career", "International career", "Early career",
                                                                  "Professional career", "Season summary", "Playing career", "Aftermath"]),
    (r"\b(battalion|regiment|division|troops|battle|attack(ed)?|infantry)\b", ["Battle", "Background", "Aftermath", "Military career",
                                                                               "Prelude", "Order of battle", "World War II", "Casualties"]),
    (r"\b(ship|guns?|knots|boilers|armou?r|turrets?)\b", ["Design",
      "Construction and service", "Service history", "Design and description",
                                                          "Armament", "Description", "Propulsion", "Construction"]),
    (r"\b(storm|hurricane|cyclone|tropical|rainfall|winds)\b", ["Meteorological history", "Impact", "Preparations", "Aftermath",
                                                                "Preparations and impact", "Climate"]),
    (r"\b(species|genus|habitat|feeds?|prey|eggs|leaves)\b", ["Description",
      "Distribution and habitat", "Taxonomy", "Ecology", "Behaviour",
                                                              "Distribution", "Taxonomy and naming", "Breeding", "Diet", "Conservation"]),
    (r"\b(highway|road|route|intersection|bridge|freeway)\b", ["Route description", "History", "Major intersections", "Route description", "Future"]),
    (r"\b(railway|station|trains?|line)\b", ["History", "Services", "Route", "Operations", "Station layout"]),
    (r"\b(population|census|households)\b", ["Demographics", "Geography", "Population", "Economy"]),
    (r"\b(river|lake|mountain|located|km|miles)\b", ["Geography", "Location", "Geology", "Geography", "Course"]),
    (r"\b(church|built|building|tower|architect)\b", ["History", "Architecture", "Description", "Construction", "Design"]),
    (r"\b(election|elected|party|minister|parliament)\b", ["Political career", "Politics", "Government", "Election", "Career", "Background"]),
    (r"\b(university|school|college|students)\b", ["Education", "Academics", "History", "Campus", "Early life and education"]),
    (r"\b(novel|poems?|published|books?|writer)\b", ["Works", "Publication history", "Writing", "Themes", "Plot", "Publication", "Style"]),
    (r"\b(king|emperor|reign|throne|dynasty)\b", ["Reign", "Background", "Legacy", "Early reign", "Succession"]),
    (r"\b(awards?|nominated|won the)\b", ["Awards", "Awards and nominations", "Legacy", "Accolades", "Honours"]),
]]
_COMMON_HEADINGS = ["History", "Background", "Legacy", "Career", "Description", "Overview", "Aftermath", "Origins", "Development",
                    "Other", "Influence", "Early history", "Later career", "Impact", "Etymology", "Culture", "Features", "Structure"]
_NAME = re.compile(r"(?<=[a-z,] )(?:[A-Z][a-z]+(?: (?:of|the|and|de) [A-Z][a-z]+| [A-Z][a-z]+){0,3})")
_YEAR = re.compile(r"\b(1[5-9]\d\d|20[01]\d)\b")


def guess_heading(paragraph: str, rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.14:
        years = sorted(set(_YEAR.findall(paragraph)))
        if len(years) > 1:
            return f"{years[0]} – {years[-1]}"
    if roll < 0.36:
        names = _NAME.findall(paragraph)
        if names:
            return max(sorted(set(names)), key=lambda n: (names.count(n), len(n)))
    topics = [h for pattern, h in _TOPICS if pattern.search(paragraph)]
    if topics and roll < 0.92:
        return rng.choice(rng.choice(topics))
    return rng.choice(_COMMON_HEADINGS)


def wikitext_article(title: str, paragraphs: list[str], rng: random.Random) -> str:
    """An article in WikiText's raw form, headings between its sections included."""
    heading = lambda text, level: f" \n {'= ' * level}{wikitext_line(text)}{' =' * level} \n \n"
    out = [heading(title, 1)]
    budget = rng.randint(300, 2000)  # bytes until the next heading; the lead has none
    level = 1
    for i, paragraph in enumerate(paragraphs):
        if i and budget <= 0:
            level = rng.choice((2, 3)) if level > 1 else 2
            out.append(heading(guess_heading(paragraph, rng), level))
            if level == 2 and rng.random() < 0.15:
                out.append(heading(guess_heading(paragraph, rng), 3))
            budget = rng.randint(500, 4000)
        out.append(f" {wikitext_line(paragraph)} \n")
        budget -= len(paragraph)
    return "".join(out) + " \n"


def read_text(path: str) -> str:
    data = Path(path).read_bytes()
    return (lzma.decompress(data) if path.endswith(".xz") else data).decode("utf-8")


def articles(text: str):
    """(title, paragraphs) of each article of a Wikipedia file; articles are cut by `= Title =` lines."""
    title, body = None, []
    for line in text.split("\n"):
        if line.startswith("= ") and line.endswith(" ="):
            if title and body:
                yield title, body
            title, body = line[2:-2], []
        elif line.strip():
            cleaned = clean(line)
            if cleaned:
                body.append(cleaned)
    if title and body:
        yield title, body


def documents(text: str, form: str, seed: int):
    """The documents of a file in one form: `wikitext`, `plain` (articles) or `book`."""
    rng = random.Random(seed)
    if form == "book":
        # Passages of random length cut at paragraph ends, so that many starts are seen.
        paragraphs, size, want = [], 0, rng.randint(1000, 40000)
        for paragraph in text.split("\n\n"):
            paragraphs.append(paragraph.strip("\n"))
            size += len(paragraph)
            if size > want:
                yield "\n\n".join(paragraphs)
                paragraphs, size, want = [], 0, rng.randint(1000, 40000)
        yield "\n\n".join(paragraphs)
    elif form == "plain":
        # Most without their title, so that a prompt may begin in the middle of prose.
        for title, body in articles(text):
            yield (f"= {title} =\n" if rng.random() < 0.3 else "") + "\n".join(body) + "\n"
    else:
        # Scored files hold many articles in one document, so several stand together here too.
        group = []
        for title, body in articles(text):
            group.append(wikitext_article(title, body, rng))
            if rng.random() < 0.2:
                yield "".join(group)
                group = []
        if group:
            yield "".join(group)


def command_tokenizer(args):
    import sentencepiece
    rng = random.Random(1)
    lines: list[str] = []
    # Each form takes whole documents at random from all over its files.
    for form, share, paths in (("wikitext", 0.55, args.wiki), ("plain", 0.25, args.wiki), ("book", 0.2, args.books)):
        for path in paths:
            text = read_text(path)
            probability = args.sample_bytes * share / len(paths) / len(text)
            for document in documents(text, form, 2):
                if rng.random() < probability:
                    lines += [line for line in document.split("\n") if line.strip()]
    rng.shuffle(lines)
    print(f"{len(lines)} lines, {sum(map(len, lines))} characters")
    # Identity normalisation and the newline symbol make encoding lossless.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=args.output.removesuffix(".model"), model_type="bpe",
        vocab_size=args.vocab_size, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=True, split_digits=False, character_coverage=0.9995,
        user_defined_symbols=["\n"], unk_id=UNK, bos_id=BOS, eos_id=EOS, pad_id=-1, max_sentence_length=20000,
        num_threads=os.cpu_count(), hard_vocab_limit=True)


_encoder = None


def _init_encoder(path):
    global _encoder
    import sentencepiece
    _encoder = sentencepiece.SentencePieceProcessor(model_file=path)


def _encode_slice(job):
    text, form, seed = job
    out, size = [], 0
    for document in documents(text, form, seed):
        out += [np.array([BOS], np.uint16), np.array(_encoder.encode(document), np.uint16)]
        size += len(document.encode())
    return np.concatenate(out), size


def command_prepare(args):
    """Renders and encodes a file in parallel slices, each starting at a document boundary."""
    text = read_text(args.input)
    boundary = "\n\n" if args.form == "book" else "\n\n= "
    cuts, workers = [0], args.workers or os.cpu_count()
    pieces = workers * 2
    for i in range(1, pieces):
        at = text.find(boundary, len(text) * i // pieces)
        if at > cuts[-1]:
            cuts.append(at)
    jobs = [(text[a:b].lstrip("\n"), args.form, args.seed + a) for a, b in zip(cuts, cuts[1:] + [len(text)])]
    with multiprocessing.Pool(workers, _init_encoder, (args.tokenizer,)) as pool:
        parts = pool.map(_encode_slice, jobs, chunksize=1)
    tokens = np.concatenate([p for p, _ in parts])
    temporary = args.output + ".part"
    tokens.tofile(temporary)
    os.replace(temporary, args.output)  # a running `train` only ever sees whole files
    print(f"{args.output}: {len(tokens)} tokens, {sum(s for _, s in parts) / len(tokens):.3f} bytes per token")

# ---------------------------------------------------------------------------------------
# The recurrence: gate-frozen sweeps forward, adjoint sweeps backward
# ---------------------------------------------------------------------------------------
#
# With w = [W_g; W_mh] stacked to [2D, D] and zc = W_mz z + b_m, a step is
#   s = sigmoid(W_g h' + b_g),  g = sigmoid(W_mh h' + zc),         h' = h_{t-1}
#   a = gamma + mu (1 - g + gamma),  b = z (s + mu g),  h = a h' + b.
# A forward sweep holds the gates at the previous iterate (one GEMM over all tokens) and solves
# the then linear recurrence by a scan.  The backward pass solves, for lambda_t = dL/dh_t,
#   lambda_t = e_t + a_{t+1} lambda_{t+1} + w^T u_{t+1},
#   u_t = lambda_t * [z s (1 - s),  mu (z - h') g (1 - g)],
# in the same way: hold w^T u, scan in reverse, repeat.  Both fixed points are exact, and
# nothing of the sweeps is kept for the backward pass except the last one.

if triton is not None:

    @triton.jit
    def _compose(a1, b1, a2, b2):
        return a1 * a2, a2 * b1 + b2

    @triton.jit
    def _forward_kernel(p_ptr, z_ptr, zc_ptr, gamma_ptr, bias_ptr, h_ptr, first_ptr, last_ptr, T, mu,
                        D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, HAS_P: tl.constexpr):
        """h rows 1..T of one batch row and BD channels; row 0 of h and p belongs to the carried state."""
        batch = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BD + tl.arange(0, BD)
        rows = tl.arange(0, BT)
        bias = tl.load(bias_ptr + cols)[None, :]
        carry = tl.load(first_ptr + batch * D + cols)
        for t0 in range(0, T, BT):
            t = (t0 + rows)[:, None]
            inside = t < T
            at = (batch * T + t) * D + cols[None, :]
            z = tl.load(z_ptr + at, mask=inside, other=0.).to(tl.float32)
            zc = tl.load(zc_ptr + at, mask=inside, other=0.).to(tl.float32)
            gamma = tl.load(gamma_ptr + at, mask=inside, other=0.).to(tl.float32)
            p1, p2 = bias, zc
            if HAS_P:
                pa = (batch * (T + 1) + t) * (2 * D) + cols[None, :]
                p1 += tl.load(p_ptr + pa, mask=inside, other=0.).to(tl.float32)
                p2 += tl.load(p_ptr + pa + D, mask=inside, other=0.).to(tl.float32)
            g = tl.sigmoid(p2)
            a = tl.where(inside, gamma + mu * (1. - g + gamma), 1.)
            b = tl.where(inside, z * (tl.sigmoid(p1) + mu * g), 0.)
            a, b = tl.associative_scan((a, b), 0, _compose)
            h = a * carry[None, :] + b
            carry = tl.sum(tl.where(rows[:, None] == BT - 1, h, 0.), 0)
            tl.store(h_ptr + (batch * (T + 1) + t + 1) * D + cols[None, :], h, mask=inside)
        tl.store(last_ptr + batch * D + cols, carry)

    @triton.jit
    def _coefficients_kernel(p_ptr, z_ptr, zc_ptr, gamma_ptr, bias_ptr, h_ptr, a_ptr, c_ptr, T, mu,
                             D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
        """a (fp32) and c = du/dlambda = [z s', mu (z - h') g'] for the adjoint sweeps."""
        batch = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BD + tl.arange(0, BD)
        t = (tl.program_id(2) * BT + tl.arange(0, BT))[:, None]
        inside = t < T
        at = (batch * T + t) * D + cols[None, :]
        pa = (batch * (T + 1) + t) * (2 * D) + cols[None, :]
        z = tl.load(z_ptr + at, mask=inside, other=0.).to(tl.float32)
        gamma = tl.load(gamma_ptr + at, mask=inside, other=0.).to(tl.float32)
        p1 = tl.load(p_ptr + pa, mask=inside, other=0.).to(tl.float32) + tl.load(bias_ptr + cols)[None, :]
        p2 = tl.load(p_ptr + pa + D, mask=inside, other=0.).to(tl.float32) + tl.load(zc_ptr + at, mask=inside, other=0.).to(tl.float32)
        before = tl.load(h_ptr + (batch * (T + 1) + t) * D + cols[None, :], mask=inside, other=0.).to(tl.float32)
        s, g = tl.sigmoid(p1), tl.sigmoid(p2)
        tl.store(a_ptr + at, gamma + mu * (1. - g + gamma), mask=inside)
        tl.store(c_ptr + pa, z * s * (1. - s), mask=inside)
        tl.store(c_ptr + pa + D, mu * (z - before) * g * (1. - g), mask=inside)

    @triton.jit
    def _adjoint_kernel(a_ptr, c_ptr, e_ptr, q_ptr, u_ptr, lambda_ptr, T, e_batch, e_time,
                        D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, HAS_Q: tl.constexpr, LAST: tl.constexpr):
        """One adjoint sweep: lambda by a scan from the right, and the next u (or lambda itself, at the last)."""
        batch = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BD + tl.arange(0, BD)
        rows = tl.arange(0, BT)
        carry = tl.zeros([BD], tl.float32)
        for i0 in range(0, T, BT):
            t = (T - 1 - i0 - rows)[:, None]  # row 0 of the tile is the latest token
            inside = t >= 0
            at = (batch * T + t) * D + cols[None, :]
            pa = (batch * (T + 1) + t) * (2 * D) + cols[None, :]
            b = tl.load(e_ptr + batch * e_batch + t * e_time + cols[None, :], mask=inside, other=0.).to(tl.float32)
            if HAS_Q:
                b += tl.load(q_ptr + (batch * (T + 1) + t + 1) * D + cols[None, :], mask=inside & (t < T - 1), other=0.).to(tl.float32)
            a = tl.load(a_ptr + at + D, mask=inside & (t < T - 1), other=0.)
            a, b = tl.associative_scan((a, b), 0, _compose)
            lam = a * carry[None, :] + b
            carry = tl.sum(tl.where(rows[:, None] == BT - 1, lam, 0.), 0)
            tl.store(u_ptr + pa, lam * tl.load(c_ptr + pa, mask=inside, other=0.).to(tl.float32), mask=inside)
            tl.store(u_ptr + pa + D, lam * tl.load(c_ptr + pa + D, mask=inside, other=0.).to(tl.float32), mask=inside)
            if LAST:
                tl.store(lambda_ptr + at, lam, mask=inside)


def _gates(p, zc, bias):
    D = zc.shape[-1]
    return torch.sigmoid(p[:, :-1, :D] + bias), torch.sigmoid(p[:, :-1, D:] + zc)


def _scan(a, b, carry):
    out = torch.empty_like(b)
    for t in range(b.shape[1]):
        carry = a[:, t] * carry + b[:, t]
        out[:, t] = carry
    return out


def forward_sweep(p, z, zc, gamma, bias, h, first, mu):
    """Writes rows 1..T of h from the gate inputs p (None: the gates see a zero state); returns h_T."""
    B, T, D = z.shape
    if z.is_cuda:
        last = torch.empty_like(first)
        BT, BD = 64, 32
        _forward_kernel[(B, D // BD)](p if p is not None else z, z, zc, gamma, bias, h, first, last, T, mu,
                                      D=D, BT=BT, BD=BD, HAS_P=p is not None, num_warps=4)
        return last
    s, g = _gates(p if p is not None else z.new_zeros(B, T + 1, 2 * D), zc, bias)
    h[:, 1:] = _scan(gamma + mu * (1 - g + gamma), z * (s + mu * g), first)
    return h[:, -1].to(first.dtype).clone()


class Sweeps:
    """How many sweeps a layer makes, and what the last of them still changed.

    With a tolerance, sweeps go on until no entry changes by more than that part of the largest entry.
    Without, while training, counts are fixed, so that the host never waits for the device; `adapt` moves
    them after steps where `measure` was set.  There the change is taken in norm, since single entries
    stored in bf16 keep flipping.
    """

    def __init__(self, forward=8, backward=6, tolerance=None):
        self.forward, self.backward, self.tolerance = forward, backward, tolerance
        self.measure, self.change_forward, self.change_backward, self.used = False, None, None, 0

    def change(self, new, old):
        if self.tolerance is None:
            return (new - old).float().norm() / new.float().norm().clamp_min(1e-30)
        return (new - old).abs().max() / new.abs().max().clamp_min(1e-30)

    def adapt(self, forward_bound, backward_bound):
        for name, bound, least, most in (("forward", forward_bound, 4, 24), ("backward", backward_bound, 3, 16)):
            change = getattr(self, "change_" + name)
            if change is not None:
                change = float(change)
                count = getattr(self, name)
                if change > bound:
                    setattr(self, name, min(most, count + 1))
                elif change < 0.3 * bound:
                    setattr(self, name, max(least, count - 1))


class GatedRecurrence(torch.autograd.Function):
    """(z, zc, gamma, w, bias, first) -> (h, h_T).  h_T carries no gradient: state is cut between chunks."""

    @staticmethod
    def forward(ctx, z, zc, gamma, w, bias, first, mu, sweeps: Sweeps):
        B, T, D = z.shape
        z, zc, gamma, bias = z.contiguous(), zc.contiguous(), gamma.contiguous(), bias.contiguous()
        wt = w.to(z.dtype).t()
        h = torch.empty(B, T + 1, D, dtype=z.dtype, device=z.device)
        h[:, 0] = first
        last = forward_sweep(None, z, zc, gamma, bias, h, first, mu)
        p, done = None, 1
        limit = sweeps.forward if sweeps.tolerance is None else 4 * T + 8
        while done < limit:
            p = h @ wt
            watch = sweeps.tolerance is not None or (sweeps.measure and done == limit - 1)
            before = h.clone() if watch else None
            last = forward_sweep(p, z, zc, gamma, bias, h, first, mu)
            done += 1
            if watch:
                sweeps.change_forward = sweeps.change(h, before)
                if sweeps.tolerance is not None and float(sweeps.change_forward) < sweeps.tolerance:
                    break
        sweeps.used = done
        ctx.save_for_backward(z, zc, gamma, w, bias, p, h)
        ctx.mu, ctx.sweeps = mu, sweeps
        ctx.mark_non_differentiable(last)
        return h[:, 1:], last

    @staticmethod
    def backward(ctx, e, _):
        z, zc, gamma, w, bias, p, h = ctx.saved_tensors
        mu, sweeps = ctx.mu, ctx.sweeps
        B, T, D = z.shape
        if sweeps.tolerance is None:
            e = e + h[:, 1:] * (STATE_DECAY / (B * T))
        wide = w.to(z.dtype)
        u = torch.zeros(B, T + 1, 2 * D, dtype=z.dtype, device=z.device)
        limit = sweeps.backward if sweeps.tolerance is None else 4 * T + 8
        before_h = h[:, :-1]
        if z.is_cuda:
            a = torch.empty(B, T, D, dtype=torch.float32, device=z.device)
            c, lam = torch.empty_like(u), torch.empty_like(z)
            if e.stride(-1) != 1:
                e = e.contiguous()
            BT, BD = 64, 32
            _coefficients_kernel[(B, D // BD, triton.cdiv(T, BT))](p, z, zc, gamma, bias, h, a, c, T, mu, D=D, BT=BT, BD=BD)
        else:
            s, g = _gates(p, zc, bias)
            a = gamma + mu * (1 - g + gamma)
            c = torch.cat([z * s * (1 - s), mu * (z - before_h) * g * (1 - g)], -1)
        q, previous = None, None
        for k in range(limit):
            if z.is_cuda:
                _adjoint_kernel[(B, D // BD)](a, c, e, q if k else u, u, lam, T, e.stride(0), e.stride(1),
                                              D=D, BT=BT, BD=BD, HAS_Q=k > 0, LAST=k == limit - 1 or sweeps.tolerance is not None, num_warps=4)
            else:
                b = e + q[:, 1:] if k else e
                a_next = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
                lam = _scan(a_next.flip(1), b.flip(1), torch.zeros_like(b[:, 0])).flip(1)
                u[:, :-1] = torch.cat([lam, lam], -1) * c
            if sweeps.tolerance is not None or (sweeps.measure and k >= limit - 2):
                if previous is not None:
                    sweeps.change_backward = sweeps.change(u, previous)
                    if sweeps.tolerance is not None and float(sweeps.change_backward) < sweeps.tolerance:
                        break
                previous = u.clone()
            if k < limit - 1:
                q = u @ wide
        dw = (u.view(-1, 2 * D).t() @ h.view(-1, D)).to(w.dtype)
        dz, dzc, dgamma = _finish_gradients(lam, u, z, zc, gamma, p, bias, before_h, mu)
        return dz, dzc, dgamma, dw, u[..., :D].sum((0, 1), dtype=bias.dtype), None, None, None


def _finish_gradients(lam, u, z, zc, gamma, p, bias, before, mu):
    D = z.shape[-1]
    s, g = _gates(p.to(gamma.dtype), zc.to(gamma.dtype), bias)
    lam = lam.to(gamma.dtype)
    dgamma = lam * before * (1 + mu)
    return (lam * (s + mu * g)).to(z.dtype), u[:, :-1, D:].to(zc.dtype), dgamma.to(gamma.dtype)


# ---------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------

CONFIG = dict(model_type="mmrec", vocab_size=8192, model_dim=384, num_layers=5, num_heads=6, ffn_dim=768,
              use_hem=False, use_dpg=False, mdi_mix=0.1, memory_segment=256, memory_slots=32, carry_state=True,
              bos_token_id=BOS, eos_token_id=EOS)


CONTEXT_BOUND = 1.484375  # (1 + mu) sigmoid(CONTEXT_BOUND) + mu < 0.997, and a bf16 number
FEEDBACK_CAPS = (1.0, 0.5)  # spectral norms of W_g and of the state half of mdi.W_g
STATE_DECAY = 2e-5  # weight of the mean over tokens of |h|^2 / 2 in the training loss


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


def rmsnorm(x, weight):
    return weight * (x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6))


class Block(nn.Module):
    """Parameters under the public names; the arithmetic is in the functions below."""

    def __init__(self, D, ffn):
        super().__init__()
        for name in ("W_q", "W_k", "W_v", "W_z", "W_g"):
            setattr(self, name, nn.Linear(D, D))
        mlp = lambda: nn.Sequential(nn.Linear(D, D // 4), nn.GELU(), nn.Linear(D // 4, D))
        self.mdi = nn.ModuleDict(dict(W_g=nn.Linear(2 * D, D), W_gamma=mlp(), W_context=mlp()))
        self.multi_mem_attention = nn.ModuleDict(dict(W_q=nn.Linear(D, D), W_o=nn.Linear(D, D)))
        self.norm1, self.norm2 = Norm(D), Norm(D)
        self.ffn = nn.Sequential(nn.Linear(D, ffn), nn.GELU(), nn.Dropout(0.0), nn.Linear(ffn, D))


def block_inputs(x, norm1, Wq, bq, Wk, bk, Wv, bv, Wz, bz, A0, a0, A2, a2, C0, c0, C2, c2, Wm, bm):
    """Everything before the recurrence, for all tokens of a chunk."""
    D = x.shape[-1]
    u = rmsnorm(x, norm1)
    q, k, v, z = F.linear(u, torch.cat([Wq, Wk, Wv, Wz]), torch.cat([bq, bk, bv, bz])).split(D, -1)
    decay = lambda y, W0, b0, W2, b2: torch.sigmoid(F.linear(F.gelu(F.linear(y, W0, b0)), W2, b2).to(x.dtype))
    gamma = (decay(z, A0, a0, A2, a2) * decay(k, C0, c0, C2, c2)).clamp(1e-6, 1 - 1e-6)
    return q, v, z.contiguous(), F.linear(z, Wm[:, :D], bm), gamma


def block_segment(x, h, q, v, memory, mask, heads, Wp, bp, Wo, bo, norm2, W1, b1, W2, b2):
    """One memory segment after the recurrence; returns the block's output and its mean, the new slot."""
    B, T, D = x.shape
    split = lambda y: y.unflatten(-1, (heads, D // heads)).transpose(1, 2)
    query = F.linear(h, Wp, bp) + 0.5 * q
    slots = split(memory.to(query.dtype))
    weights = torch.softmax((split(query) @ slots.mT).to(x.dtype) * (D // heads) ** -0.5 + mask, -1)
    context = weights.to(query.dtype) @ slots
    y = x + h + F.linear(context.transpose(1, 2).reshape(B, T, D), Wo, bo) + 0.1 * v
    out = y + F.linear(F.gelu(F.linear(rmsnorm(y, norm2), W1, b1)), W2, b2)
    return out, out.mean(1)


def cross_entropy(x, norm, embedding, targets):
    logits = F.linear(rmsnorm(x, norm), embedding)
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten(), reduction="none")


class State:
    """What is carried from chunk to chunk: per layer h and the ring of slots; how many slots are written."""

    def __init__(self, model, batch, dtype=torch.float32):
        c, device = model.config, model.embedding.weight.device
        D, M = c["model_dim"], c["memory_slots"]
        self.h = [torch.zeros(batch, D, dtype=dtype, device=device) for _ in model.blocks]
        self.memory = [torch.zeros(batch, M, D, dtype=dtype, device=device) for _ in model.blocks]
        self.written = torch.zeros(batch, dtype=torch.long, device=device)

    def reset(self, rows):
        """Rows (bool [B]) start afresh."""
        for i in range(len(self.h)):
            self.h[i] = self.h[i].masked_fill(rows[:, None], 0)
            self.memory[i] = self.memory[i].masked_fill(rows[:, None, None], 0)
        self.written = self.written * (~rows)

    def broken(self, limit=1e3):
        """Rows whose state left the sensible range (bool [B])."""
        return ~torch.stack([h.abs().amax(1) < limit for h in self.h]).all(0)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        D = config["model_dim"]
        self.embedding = nn.Embedding(config["vocab_size"], D)
        self.blocks = nn.ModuleList(Block(D, config["ffn_dim"]) for _ in range(config["num_layers"]))
        self.norm = Norm(D)
        self.sweeps = [Sweeps() for _ in self.blocks]
        self.functions = (block_inputs, block_segment, cross_entropy)
        self.probe = None
        self.initialise()

    @torch.no_grad()
    def initialise(self):
        D, mu = self.config["model_dim"], self.config["mdi_mix"]
        self.embedding.weight.normal_(0, 0.03)
        for block in self.blocks:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, module.in_features ** -0.5)
                    module.bias.zero_()
            context = block.mdi["W_context"][2]
            context.weight.copy_(-0.1 * context.weight.abs())
            context.bias.fill_(CONTEXT_BOUND)
            # Time constants 1.5 to 10 tokens at the start, inputs scaled so that slow and fast channels begin
            # with states of one size.  a = gamma (1 + mu) + mu (1 - g); longer ones are learnt by closing g.
            block.mdi["W_g"].bias.fill_(-1.0)
            tau = torch.exp(torch.linspace(math.log(1.5), math.log(10), D))
            a = 1 - 1 / tau
            gamma = (a - mu * torch.sigmoid(torch.tensor(1.0))) / (1 + mu)
            block.mdi["W_gamma"][2].bias.copy_(torch.logit(gamma / 0.79))
            block.mdi["W_gamma"][2].weight.mul_(0.3)
            block.W_z.weight.mul_((1 - a * a).sqrt()[:, None])
            # Weak dependence of the gates on the state: few sweeps converge.
            block.W_g.weight.mul_(0.3)
            block.mdi["W_g"].weight.mul_(0.5)
            block.mdi["W_g"].weight[:, D:].mul_(0.2)
            block.ffn[3].weight.mul_(0.1)
            block.multi_mem_attention["W_o"].weight.mul_(0.1)
        self.project()

    @torch.no_grad()
    def project(self):
        """Keeps the recurrence tame, after each optimizer step.

        Decays below 1: a = gamma (1 + mu) + mu (1 - g) can exceed 1, and a growing state that closes its own g
        then runs away.  gamma is at most the context factor, whose logit is C2 gelu(.) + c2; gelu is at least
        -0.17, so C2 <= 0 and c2 + 0.17 sum|C2| <= CONTEXT_BOUND bound it: a < 0.997 whatever g does.

        Weak feedback: the largest singular values of W_g and of the state half of mdi.W_g are capped (one step of
        the power iteration at a time).  Without this the gates' dependence on the state grows until the recurrence
        is chaotic: gradients explode and sweeps converge slowly.
        """
        D = self.config["model_dim"]
        for block in self.blocks:
            context = block.mdi["W_context"][2]
            context.weight.clamp_(-0.1, 0)
            context.bias.copy_(torch.minimum(context.bias, CONTEXT_BOUND + 0.17 * context.weight.sum(1)))
        feedback = [b.W_g.weight for b in self.blocks] + [b.mdi["W_g"].weight[:, D:] for b in self.blocks]
        stacked = torch.stack(feedback)
        if self.probe is None or self.probe.device != stacked.device:
            self.probe = torch.randn(len(feedback), D, 1, device=stacked.device)
            for _ in range(20):
                self.probe = F.normalize(stacked.mT @ (stacked @ self.probe), dim=1)
        self.probe = F.normalize(stacked.mT @ (stacked @ self.probe), dim=1)
        largest = (stacked @ self.probe).norm(dim=(1, 2))
        caps = torch.tensor(FEEDBACK_CAPS, device=stacked.device).repeat_interleave(len(self.blocks))
        torch._foreach_mul_(feedback, list((caps / largest).clamp_max(1).unbind()))

    def forward(self, tokens, state, targets=None):
        """One chunk, its first token at a segment boundary.  Returns the losses per token, or logits."""
        c = self.config
        D, C, heads, mu = c["model_dim"], c["memory_segment"], c["num_heads"], c["mdi_mix"]
        inputs, segment, loss = self.functions
        x = self.embedding(tokens)
        T = tokens.shape[1]
        starts = range(0, T, C)
        slot = torch.arange(c["memory_slots"], device=x.device)
        masks = []
        for i, _ in enumerate(starts):
            written = (state.written + i).clamp_max(c["memory_slots"])[:, None]
            # New slots enter at the end.  With none written all are zeros: uniform attention gives the 0 wanted.
            visible = (slot >= c["memory_slots"] - written).logical_or(written == 0)
            masks.append(torch.zeros_like(visible, dtype=x.dtype).masked_fill(~visible, -1e30)[:, None, None, :])
        for i, (block, sweeps) in enumerate(zip(self.blocks, self.sweeps)):
            pair = lambda m: (m.weight, m.bias)
            mdi, attention = block.mdi, block.multi_mem_attention
            q, v, z, zc, gamma = inputs(x, block.norm1.weight, *pair(block.W_q), *pair(block.W_k), *pair(block.W_v), *pair(block.W_z),
                                        *pair(mdi["W_gamma"][0]), *pair(mdi["W_gamma"][2]),
                                        *pair(mdi["W_context"][0]), *pair(mdi["W_context"][2]), *pair(mdi["W_g"]))
            w = torch.cat([block.W_g.weight, mdi["W_g"].weight[:, D:]])
            h, state.h[i] = GatedRecurrence.apply(z, zc, gamma, w, block.W_g.bias, state.h[i], mu, sweeps)
            memory, outs = state.memory[i], []
            # split, not slices: the gradient of a slice would be padded to the whole chunk and added.
            parts = zip(starts, masks, *(y.split(C, 1) for y in (x, h, q, v)))
            for t0, mask, xs, hs, qs, vs in parts:
                out, mean = segment(xs, hs, qs, vs, memory, mask, heads, *pair(attention["W_q"]),
                                    *pair(attention["W_o"]), block.norm2.weight, *pair(block.ffn[0]), *pair(block.ffn[3]))
                outs.append(out)
                if t0 + C <= T:
                    memory = torch.cat([memory[:, 1:], mean.to(memory.dtype)[:, None]], 1)
            state.memory[i] = memory.detach()
            x = torch.cat(outs, 1)
        state.written = state.written + T // C
        if targets is not None:
            return loss(x, self.norm.weight, self.embedding.weight, targets).view_as(targets)
        return F.linear(rmsnorm(x, self.norm.weight), self.embedding.weight)

    @torch.no_grad()
    def step_logprobs(self, tokens):
        """log p(token t+1 | 0..t) of one sequence by the plain step loop of the definition: the yardstick."""
        c = self.config
        D, C, M, heads, mu = c["model_dim"], c["memory_segment"], c["memory_slots"], c["num_heads"], c["mdi_mix"]
        x = self.embedding(tokens[:-1])
        T = len(x)
        for block in self.blocks:
            mdi, attention = block.mdi, block.multi_mem_attention
            q, k, v, z = (m(rmsnorm(x, block.norm1.weight)) for m in (block.W_q, block.W_k, block.W_v, block.W_z))
            gamma = (torch.sigmoid(mdi["W_gamma"](z)) * torch.sigmoid(mdi["W_context"](k))).clamp(1e-6, 1 - 1e-6)
            h, state = torch.empty_like(x), torch.zeros_like(x[0])
            for t in range(T):
                s, g = torch.sigmoid(block.W_g(state)), torch.sigmoid(mdi["W_g"](torch.cat([z[t], state])))
                state = (gamma[t] + mu * (1 - g + gamma[t])) * state + z[t] * (s + mu * g)
                h[t] = state
            slots, outs = [], []
            for t0 in range(0, T, C):
                cut = slice(t0, min(T, t0 + C))
                context = torch.zeros_like(x[cut])
                if slots:
                    kv = torch.stack(slots[-M:]).view(-1, heads, D // heads).transpose(0, 1)
                    query = (attention["W_q"](h[cut]) + 0.5 * q[cut]).view(-1, heads, D // heads).transpose(0, 1)
                    weights = torch.softmax(query @ kv.transpose(1, 2) / math.sqrt(D // heads), -1)
                    context = (weights @ kv).transpose(0, 1).reshape(-1, D)
                y = x[cut] + h[cut] + attention["W_o"](context) + 0.1 * v[cut]
                outs.append(y + block.ffn(rmsnorm(y, block.norm2.weight)))
                if t0 + C <= T:
                    slots.append(outs[-1].mean(0))
            x = torch.cat(outs)
        logits = F.linear(rmsnorm(x, self.norm.weight), self.embedding.weight)
        return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]


class Stepper:
    """One token at a time, for sampling: the definition, with the state of one sequence."""

    def __init__(self, model):
        self.model, D = model, model.config["model_dim"]
        zeros = lambda: [torch.zeros(D, dtype=model.norm.weight.dtype, device=model.norm.weight.device) for _ in model.blocks]
        self.h, self.total, self.count = zeros(), zeros(), 0
        self.slots = [[] for _ in model.blocks]

    @torch.no_grad()
    def __call__(self, token):
        """Consumes a token; returns the logits of the next."""
        c = self.model.config
        heads, mu, C, M = c["num_heads"], c["mdi_mix"], c["memory_segment"], c["memory_slots"]
        x = self.model.embedding.weight[token]
        self.count += 1
        for i, block in enumerate(self.model.blocks):
            mdi, attention, before = block.mdi, block.multi_mem_attention, self.h[i]
            u = rmsnorm(x, block.norm1.weight)
            z = block.W_z(u)
            gamma = (torch.sigmoid(mdi["W_gamma"](z)) * torch.sigmoid(mdi["W_context"](block.W_k(u)))).clamp(1e-6, 1 - 1e-6)
            s, g = torch.sigmoid(block.W_g(before)), torch.sigmoid(mdi["W_g"](torch.cat([z, before])))
            h = self.h[i] = (gamma + mu * (1 - g + gamma)) * before + z * (s + mu * g)
            context = torch.zeros_like(x)
            if self.slots[i]:
                kv = torch.stack(self.slots[i]).view(-1, heads, len(x) // heads)
                query = (attention["W_q"](h) + 0.5 * block.W_q(u)).view(heads, -1)
                weights = torch.softmax(torch.einsum("hd,shd->hs", query, kv) * (len(x) // heads) ** -0.5, -1)
                context = torch.einsum("hs,shd->hd", weights, kv).flatten()
            y = x + h + attention["W_o"](context) + 0.1 * block.W_v(u)
            x = y + block.ffn(rmsnorm(y, block.norm2.weight))
            self.total[i] = self.total[i] + x
            if self.count % C == 0:
                self.slots[i] = (self.slots[i] + [self.total[i] / C])[-M:]
                self.total[i] = torch.zeros_like(x)
        return self.model.embedding.weight @ rmsnorm(x, self.model.norm.weight)


def command_selftest(args):
    """Sweeps against the step loop: values, and every gradient, in float64 on the CPU."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    B, T, D, mu = 3, 150, 64, 0.1
    z, zc, first = torch.randn(B, T, D), torch.randn(B, T, D), torch.randn(B, D)
    gamma, w, bias = torch.rand(B, T, D) * 0.85, torch.randn(2 * D, D) * 0.15, torch.randn(D)
    leaves = [t.requires_grad_() for t in (z, zc, gamma, w, bias)]
    weight = torch.randn(B, T, D)
    h, state = [], first
    for t in range(T):
        s, g = torch.sigmoid(state @ w[:D].t() + bias), torch.sigmoid(state @ w[D:].t() + zc[:, t])
        state = (gamma[:, t] + mu * (1 - g + gamma[:, t])) * state + z[:, t] * (s + mu * g)
        h.append(state)
    h = torch.stack(h, 1)
    expected = torch.autograd.grad((h * weight).sum(), leaves)
    got_h, _ = GatedRecurrence.apply(z, zc, gamma, w, bias, first, mu, Sweeps(tolerance=1e-14))
    got = torch.autograd.grad((got_h * weight).sum(), leaves)
    worst = 0.0
    for name, e, g in zip(("h", "dz", "dzc", "dgamma", "dw", "dbias"), (h, *expected), (got_h, *got)):
        worst = max(worst, float((e - g).detach().abs().max()))
        print(f"{name:6s} {float((e - g).detach().abs().max()):.1e}  (largest entry {float(e.detach().abs().max()):.2f})")
    if torch.cuda.is_available():
        cast = lambda t: t.detach().float().cuda()
        on_device = [cast(t).requires_grad_() for t in leaves]
        device_h, _ = GatedRecurrence.apply(*on_device, cast(first), mu, Sweeps(tolerance=1e-7))
        device_got = torch.autograd.grad((device_h * cast(weight)).sum(), on_device)
        for name, e, g in zip(("h", "dz", "dzc", "dgamma", "dw", "dbias"), (h, *expected), (device_h, *device_got)):
            relative = float((e - g.cpu()).detach().norm() / e.detach().norm())
            print(f"kernels, fp32: {name:6s} relative error {relative:.1e}")
            assert relative < 1e-4, name
    # The whole model, several segments and chunks with carried state, against the step loop.
    config = dict(CONFIG, vocab_size=50, model_dim=32, num_layers=2, num_heads=4, ffn_dim=48, memory_segment=8, memory_slots=3)
    model = Model(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.sweeps = [Sweeps(tolerance=1e-14) for _ in model.blocks]
    tokens = torch.randint(0, 50, (70,))
    state, losses = State(model, 1, torch.float64), []
    for t0, t1 in ((0, 24), (24, 32), (32, 69)):
        losses.append(model(tokens[None, t0:t1], state, tokens[None, t0 + 1:t1 + 1])[0])
    difference = float((torch.cat(losses) + model.step_logprobs(tokens)).detach().abs().max())
    stepper = Stepper(model)
    stepped = torch.stack([torch.log_softmax(stepper(a), -1)[b] for a, b in zip(tokens[:-1], tokens[1:])])
    difference = max(difference, float((torch.cat(losses) + stepped).detach().abs().max()))
    print(f"model: largest log-prob difference {difference:.1e}")
    assert worst < 1e-8 and difference < 1e-8, "sweeps disagree with the step loop"

# ---------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------

class Muon:
    """Momentum orthogonalised by a Newton-Schulz iteration, for the matrices of the blocks; equal shapes in one batch."""

    def __init__(self, parameters, momentum=0.95, decay=0.1):
        self.momentum, self.decay, self.groups = momentum, decay, {}
        for p in parameters:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.buffers = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr):
        for shape, parameters in self.groups.items():
            gradient = torch.stack([p.grad for p in parameters]).float()
            buffer = self.buffers[shape].lerp_(gradient, 1 - self.momentum)
            update = gradient.lerp(buffer, self.momentum).bfloat16()  # Nesterov
            tall = shape[0] > shape[1]
            if tall:
                update = update.mT
            update = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                square = update @ update.mT
                update = 3.4445 * update + (-4.7750 * square + 2.0315 * square @ square) @ update
            if tall:
                update = update.mT
            scale = lr * max(1, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(parameters, 1 - lr * self.decay)
            torch._foreach_add_(parameters, list(update.to(parameters[0].dtype).unbind(0)), alpha=-scale)


class Streams:
    """Rows of contiguous text.  A row follows a span of about `span` tokens, from one document start to
    another, then goes on with the next span of its draw; spans of a form come in a shuffled order, each
    once per pass.  Token files that appear in the folder while training runs are picked up."""

    def __init__(self, folder, mix, batch, length, device, span=16384, seed=0):
        self.folder, self.mix, self.length, self.device, self.span = Path(folder), mix, length, device, span
        self.rng = np.random.default_rng(seed)
        self.files, self.tokens, self.host = set(), None, np.zeros(0, np.uint16)
        self.spans = {form: [] for form in mix}
        self.queue = {form: [] for form in mix}
        self.passes = {form: 0 for form in mix}
        self.refresh()
        self.at = np.zeros(batch, np.int64)
        self.end = np.zeros(batch, np.int64)
        self.offsets = torch.arange(length + 1, device=device)

    def refresh(self):
        new = [p for p in sorted(self.folder.glob("*.bin")) if p.name not in self.files]
        for path in new:
            form = path.name.split("-")[0]
            self.files.add(path.name)
            if form not in self.mix:
                continue
            tokens = np.fromfile(path, np.uint16)
            base = len(self.host)
            starts = np.flatnonzero(tokens == BOS)
            cuts = starts[np.unique(np.searchsorted(starts, np.arange(0, starts[-1], self.span)))]
            spans = [(base + a, base + b) for a, b in zip(cuts, cuts[1:])]
            self.spans[form] += spans
            self.queue[form] += [spans[i] for i in self.rng.permutation(len(spans))]
            self.host = np.concatenate([self.host, tokens])
            print(f"data: {path.name}, {len(tokens)} tokens, {len(spans)} spans", flush=True)
        if new:
            self.tokens = torch.from_numpy(self.host.view(np.int16)).to(self.device)

    def draw(self):
        forms = [f for f in self.mix if self.spans[f]]
        share = np.array([self.mix[f] for f in forms])
        form = forms[self.rng.choice(len(forms), p=share / share.sum())]
        if not self.queue[form]:
            self.queue[form] = [self.spans[form][i] for i in self.rng.permutation(len(self.spans[form]))]
            self.passes[form] += 1
        return self.queue[form].pop()

    def next(self, reset):
        """Tokens [B, length + 1]; rows in `reset` (bool) take a new span now."""
        for row in np.flatnonzero(reset | (self.at >= self.end)):
            self.at[row], self.end[row] = self.draw()
        # A span's last chunk runs on into the text behind it; only the file end needs care.
        start = np.minimum(self.at, len(self.host) - self.length - 1)
        self.at += self.length
        index = torch.from_numpy(start).to(self.device, non_blocking=True)[:, None] + self.offsets
        return self.tokens[index].long() & 0xFFFF


def schedule(progress, hold):
    """Learning-rate factor over the wall time: short warm-up, constant until `hold`, linear to zero."""
    return min(1.0, progress / 0.015 + 0.02, max(0.0, (1 - progress) / (1 - hold)))


def masked_unknown(ids, processor):
    """Targets to leave out of the validation loss: the pieces of the literal `<unk>` of the tokenised files."""
    pieces = processor.encode("a <unk>")
    pieces = pieces[pieces.index(processor.piece_to_id("<0x3C>")):]
    keep = np.ones(len(ids), bool)
    for i in np.flatnonzero(ids == pieces[0]):
        if list(ids[i:i + len(pieces)]) == pieces:
            keep[i:i + len(pieces)] = False
    return keep


@torch.no_grad()
def score(model, ids, chunk=1024, tolerance=1e-5, rows=1, precision=None):
    """Negative log-likelihoods of ids[1:], as one sequence with carried state (rows > 1: cut into that many)."""
    device = model.embedding.weight.device
    saved, model.sweeps = model.sweeps, [Sweeps(tolerance=tolerance) for _ in model.blocks]
    functions, model.functions = model.functions, (block_inputs, block_segment, cross_entropy)
    length = (len(ids) - 1) // rows
    ids = torch.from_numpy(np.stack([ids[i * length:(i + 1) * length + 1] for i in range(rows)]).astype(np.int64)).to(device)
    state, losses, used = State(model, rows), [], []
    for t in range(0, length, chunk):
        end = min(length, t + chunk)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            losses.append(model(ids[:, t:end], state, ids[:, t + 1:end + 1]).double())
        used.append([s.used for s in model.sweeps])
    model.sweeps, model.functions = saved, functions
    return torch.cat(losses, 1).flatten().cpu().numpy(), np.array(used)


def encode_document(path, tokenizer):
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    raw = Path(path).read_bytes()
    return np.array([BOS] + processor.encode(raw.decode("utf-8")), np.int64), len(raw), processor


def command_train(args):
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    device = torch.device(args.device)
    out = Path(args.output)
    out.mkdir(parents=True, exist_ok=True)
    model = (load_folder(args.init) if args.init else Model(CONFIG)).to(device).train()
    if args.compile:
        model.functions = tuple(torch.compile(f, dynamic=False) for f in model.functions)
    gates, matrices, rest = [], [], []
    for name, p in model.named_parameters():
        if name.endswith("W_g.weight") or name.endswith("W_context.2.weight"):
            gates.append(p)  # the matrices that `project` constrains
        elif p.ndim == 2 and name.startswith("blocks."):
            matrices.append(p)
        else:
            rest.append(p)
    muon = Muon(matrices)
    adam = torch.optim.AdamW([dict(params=rest, weight_decay=0.0, peak=args.lr), dict(params=gates, weight_decay=0.1, peak=args.lr / 3)],
                             lr=args.lr, betas=(0.9, 0.95), eps=1e-10, fused=device.type == "cuda")
    streams = Streams(args.tokens, args.mix, args.batch, args.length, device, seed=args.seed)
    state = State(model, args.batch)
    valid = None
    if args.valid:
        ids, _, processor = encode_document(args.valid, args.tokenizer)
        valid = ids, masked_unknown(ids, processor)[1:]
    rng = np.random.default_rng(args.seed)
    parameters = list(model.parameters())
    log = open(out / "log.txt", "a")

    def say(text):
        print(text, flush=True)
        log.write(text + "\n")
        log.flush()

    def snapshot():
        return ([p.detach().clone() for p in parameters], copy.deepcopy(adam.state_dict()),
                {k: b.clone() for k, b in muon.buffers.items()})

    def restore(saved):
        with torch.no_grad():
            for p, value in zip(parameters, saved[0]):
                p.copy_(value)
        adam.load_state_dict(copy.deepcopy(saved[1]))
        for k, value in saved[2].items():
            muon.buffers[k].copy_(value)
        state.reset(torch.ones(args.batch, dtype=torch.bool, device=device))

    def validate():
        # The text of whole documents, cut in 16 parts scored side by side; relative numbers only.
        rows = 16
        losses, used = score(model, valid[0], rows=rows, tolerance=1e-3)
        keep = valid[1][:len(losses)]
        return losses[keep].sum() / keep.sum(), used.mean(0).round(1).tolist(), used.max(0).tolist()

    say(f"{sum(p.numel() for p in parameters)} parameters, {args.batch} x {args.length} tokens per step")
    start, step, seen, running, skipped = time.time(), 0, 0, None, torch.zeros((), device=device)
    good_loss, good_state, rate = math.inf, snapshot(), args.rate
    shown, next_save, next_valid, next_look = start, args.save_every, args.valid_every, 5
    while True:
        elapsed = time.time() - start
        progress = elapsed / args.seconds
        if progress >= 1 or step == args.steps:
            break
        if elapsed > next_look:
            streams.refresh()
            next_look = elapsed + 5
        reset = rng.random(args.batch) < args.reset
        tokens = streams.next(reset)
        state.reset(torch.from_numpy(reset).to(device) | state.broken())
        measure = step % 50 == 49
        for s in model.sweeps:
            s.measure = measure
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = model(tokens[:, :-1], state, tokens[:, 1:])
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip, foreach=True)
        # A step with a non-finite gradient is dropped without asking the device: gradients become zero.
        good = torch.isfinite(norm)
        skipped += ~good
        for p in parameters:
            p.grad = torch.where(good, p.grad, torch.zeros_like(p.grad))
        factor = schedule(progress, args.hold) * rate
        for group in adam.param_groups:
            group["lr"] = group["peak"] * factor
        adam.step()
        muon.step(args.muon_lr * factor)
        model.project()
        for p in parameters:
            p.grad = None
        step += 1
        seen += tokens[:, 1:].numel()
        loss = losses.detach().mean()
        running = loss if running is None else running.lerp(loss, 0.05)
        if measure:
            changes = [(float(s.change_forward), float(s.change_backward)) for s in model.sweeps]
            now = time.time()
            say(f"step {step} {elapsed:.0f}s seen {seen / 1e6:.1f}M loss {float(running):.4f} norm {float(norm):.3f} lr {factor:.3f} "
                f"{50 * tokens[:, 1:].numel() / (now - shown) / 1e3:.0f}k/s skipped {int(skipped)} passes {streams.passes} "
                f"sweeps {[(s.forward, s.backward) for s in model.sweeps]} change {[f'{a:.0e}/{b:.0e}' for a, b in changes]} "
                f"|h| {[round(float(h.abs().max()), 1) for h in state.h]}")
            shown = now
            for s in model.sweeps:
                s.adapt(4e-3, 2e-2)
            if not float(running) < good_loss + 0.25:  # diverged: back to the last good weights, slower
                restore(good_state)
                rate, running = 0.6 * rate, None
                say(f"restored, rate {rate:.2f}")
            elif float(running) < good_loss + 0.05:
                good_loss = min(good_loss, float(running))
                if step % 500 == 0:
                    good_state = snapshot()
        if elapsed > next_save:
            torch.save(dict(model=model.state_dict(), step=step, seen=seen), out / "part.tmp")
            os.replace(out / "part.tmp", out / "checkpoint.pt")
            next_save = elapsed + args.save_every
        if valid is not None and elapsed > next_valid:
            began = time.time()
            loss, mean, most = validate()
            say(f"valid {loss:.4f} sweeps mean {mean} most {most} ({time.time() - began:.1f}s)")
            next_valid = elapsed + args.valid_every
            shown += time.time() - began
    torch.save(dict(model=model.state_dict(), step=step, seen=seen, seconds=time.time() - start), out / "final.tmp")
    os.replace(out / "final.tmp", out / "final.pt")
    say(f"done: {step} steps, {seen / 1e6:.1f}M tokens, {time.time() - start:.0f}s")
    if valid is not None:
        say("final valid %.4f sweeps mean %s most %s" % validate())


# ---------------------------------------------------------------------------------------
# Model folder: writing, reading, and what is measured from it
# ---------------------------------------------------------------------------------------

def write_safetensors(path, tensors, metadata=None):
    """bf16, fp32 and int32 tensors; sorted by name, contiguous from offset 0, header padded to 8 bytes."""
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}
    head, offset = ({"__metadata__": metadata} if metadata else {}), 0
    for name in sorted(tensors):
        t = tensors[name]
        size = t.numel() * t.element_size()
        head[name] = dict(dtype=kinds[t.dtype], shape=list(t.shape), data_offsets=[offset, offset + size])
        offset += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            f.write(tensors[name].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return offset


def read_safetensors(path):
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}
    raw = Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, entry in json.loads(raw[8:8 + n]).items():
        if name != "__metadata__":
            a, b = entry["data_offsets"]
            data = torch.frombuffer(bytearray(raw[8 + n + a:8 + n + b]), dtype=kinds[entry["dtype"]])
            out[name] = data.view(entry["shape"])
    return out


def load_folder(folder, device="cpu", dtype=torch.float32):
    """The exported model, its weights widened."""
    folder = Path(folder)
    model = Model(json.loads((folder / "config.json").read_text()))
    weights = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        weights.update(read_safetensors(shard))
    model.load_state_dict({k: v.to(dtype) for k, v in weights.items()})
    return model.to(device, dtype).eval()


def command_export(args):
    """Checkpoint (or, with none, an untrained model) to a folder; no shard above 16 MiB."""
    torch.manual_seed(0)
    model = Model(CONFIG)
    if args.checkpoint:
        model.load_state_dict(torch.load(args.checkpoint, map_location="cpu")["model"])
    weights = {k: v.detach().to(torch.bfloat16) for k, v in model.state_dict().items()}
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    limit = 15 * 2**20
    shards, size = [{}], 0
    for name in sorted(weights):
        bytes_ = weights[name].numel() * 2
        if shards[-1] and size + bytes_ > limit:
            shards.append({})
            size = 0
        shards[-1][name] = weights[name]
        size += bytes_
    index, total = {}, 0
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        total += write_safetensors(folder / file, shard, {"format": "pt"})
        index.update({name: file for name in shard})
    dump = lambda name, value: (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    dump("model.safetensors.index.json", dict(metadata=dict(total_size=total), weight_map=dict(sorted(index.items()))))
    dump("config.json", CONFIG)
    dump("generation_config.json", dict(bos_token_id=BOS, eos_token_id=EOS, do_sample=True, temperature=0.7, top_k=40, top_p=0.92,
                                        repetition_penalty=1.05))
    dump("tokenizer_config.json", dict(tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False,
                                       bos_token="<s>", eos_token="</s>", unk_token="<unk>", legacy=False))
    if Path(args.tokenizer).resolve() != (folder / "tokenizer.model").resolve():
        shutil.copyfile(args.tokenizer, folder / "tokenizer.model")
    print(f"{folder}: {total // 2} parameters in {len(shards)} shards")


def command_evaluate(args):
    model = load_folder(args.model, args.device)
    ids, size, processor = encode_document(args.text, str(Path(args.model) / "tokenizer.model"))
    if args.limit:
        ids = ids[:args.limit]
    began = time.time()
    losses, used = score(model, ids, tolerance=args.tolerance)
    keep = masked_unknown(ids, processor)[1:] if args.skip_unknown else np.ones(len(losses), bool)
    nats = losses[keep].sum()
    result = dict(text=Path(args.text).name, tokens=int(keep.sum()), nats=float(nats), token_perplexity=float(np.exp(nats / keep.sum())),
                  sweeps_mean=used.mean(0).round(2).tolist(), sweeps_most=used.max(0).tolist(), tolerance=args.tolerance)
    if not args.limit and not args.skip_unknown:
        result.update(bytes=size, bits_per_byte=float(nats / math.log(2) / size))
    print(json.dumps(result), f"{time.time() - began:.1f}s")


def command_sweeps(args):
    """Sweeps per layer, windows of several sizes, to 1e-3 and 1e-5, over the first tokens of a text."""
    model = load_folder(args.model, args.device)
    ids, _, _ = encode_document(args.text, str(Path(args.model) / "tokenizer.model"))
    for chunk in (256, 1024, 4096):
        for tolerance in (1e-3, 1e-5):
            _, used = score(model, ids[:args.tokens + 1], chunk=chunk, tolerance=tolerance)
            print(f"window {chunk:5d} to {tolerance:.0e}: mean {used.mean(0).round(1).tolist()} most {used.max(0).tolist()}")


def command_heldout(args):
    """input_ids [1, n + 1] and log-probs [1, n] by the plain step loop in fp32."""
    model = load_folder(args.model)
    ids, _, _ = encode_document(args.text, str(Path(args.model) / "tokenizer.model"))
    ids = torch.from_numpy(ids[:args.tokens + 1])
    logprobs = model.step_logprobs(ids)
    weights = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(args.model).glob("model-*.safetensors")))).hexdigest()
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(args.output, dict(input_ids=ids[None].int(), logprobs=logprobs[None].float()), {"weights_sha256": weights})
    print(f"{args.output}: {len(logprobs)} log-probs, mean {float(logprobs.mean()):.5f}")


def command_sample(args):
    """Samples with the folder's generation_config.json, one token at a time."""
    import sentencepiece
    model = load_folder(args.model)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(Path(args.model) / "tokenizer.model"))
    c = json.loads((Path(args.model) / "generation_config.json").read_text())
    for i, prompt in enumerate(args.prompt):
        generator = torch.Generator().manual_seed(args.seed + i)
        ids = [BOS] + processor.encode(prompt.replace("\\n", "\n"))
        stepper = Stepper(model)
        for token in ids:
            logits = stepper(token)
        while len(ids) < args.tokens:
            seen = torch.tensor(sorted(set(ids)))
            penalised = logits[seen]
            logits[seen] = torch.where(penalised > 0, penalised / c["repetition_penalty"], penalised * c["repetition_penalty"])
            top = (logits / c["temperature"]).topk(c["top_k"])
            p = torch.softmax(top.values, -1)
            p[p.cumsum(-1) - p > c["top_p"]] = 0
            ids.append(int(top.indices[torch.multinomial(p, 1, generator=generator)]))
            if ids[-1] in (BOS, EOS):
                break
            logits = stepper(ids[-1])
        print(f"--- {prompt!r}\n{processor.decode(ids)}\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, function):
        p = commands.add_parser(name, help=(function.__doc__ or "").split("\n")[0])
        p.set_defaults(function=function)
        return p

    p = command("tokenizer", command_tokenizer)
    p.add_argument("--wiki", nargs="+", required=True)
    p.add_argument("--books", nargs="+", required=True)
    p.add_argument("--output", required=True)
    p.add_argument("--vocab-size", type=int, default=CONFIG["vocab_size"])
    p.add_argument("--sample-bytes", type=int, default=40_000_000)

    p = command("prepare", command_prepare)
    p.add_argument("--input", required=True)
    p.add_argument("--form", choices=("wikitext", "plain", "book"), required=True)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--output", required=True, help="named FORM-anything.bin")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--workers", type=int)

    command("selftest", command_selftest)

    p = command("train", command_train)
    p.add_argument("--tokens", required=True, help="folder of FORM-*.bin files; files that arrive later are picked up")
    p.add_argument("--output", required=True)
    p.add_argument("--seconds", type=float, required=True, help="wall time; the learning rate follows it")
    p.add_argument("--mix", type=json.loads, default={"wikitext": 0.62, "plain": 0.14, "book": 0.24})
    p.add_argument("--steps", type=int, default=-1)
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--length", type=int, default=1024, help="tokens per step and row, whole memory segments")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--muon-lr", type=float, default=0.01)
    p.add_argument("--init", help="model folder to start from")
    p.add_argument("--hold", type=float, default=0.3, help="part of the time at the full learning rate")
    p.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--reset", type=float, default=0.05)
    p.add_argument("--valid")
    p.add_argument("--tokenizer")
    p.add_argument("--valid-every", type=float, default=180)
    p.add_argument("--save-every", type=float, default=60)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--device", default="cuda")
    p.add_argument("--seed", type=int, default=1)

    p = command("export", command_export)
    p.add_argument("--checkpoint")
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--output", required=True)

    for name, function in (("evaluate", command_evaluate), ("sweeps", command_sweeps), ("heldout", command_heldout)):
        p = command(name, function)
        p.add_argument("--model", required=True)
        p.add_argument("--text", required=True)
        p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if name == "evaluate":
            p.add_argument("--tolerance", type=float, default=1e-5)
            p.add_argument("--limit", type=int)
            p.add_argument("--skip-unknown", action="store_true", help="leave out the literal <unk> of tokenised files")
        else:
            p.add_argument("--tokens", type=int, default=4096 if name == "heldout" else 16384)
        if name == "heldout":
            p.add_argument("--output", required=True)

    p = command("sample", command_sample)
    p.add_argument("--model", required=True)
    p.add_argument("--tokens", type=int, default=300)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("prompt", nargs="+")

    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
