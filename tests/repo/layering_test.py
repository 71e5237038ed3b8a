#!/usr/bin/env python3
"""The sentence the folders tell, checked: apps use the engine; the engine runs models; models call kernels.

Includes point rightward only, and public headers need nothing but the standard library and each other.
"""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIXES = {".h", ".cpp", ".inl", ".cu", ".cuh"}
LAYERS = ["apps", "engine", "models", "kernels"]  # left to right
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
STANDARD = re.compile(r"[a-z_0-9]+")  # <vector>, <cstdint>: a standard header has neither slash nor suffix

# Third-party headers, and the layers that may see them.
THIRD_PARTY = {
    "oneapi/dnnl/": {"kernels", "apps"},  # apps: mmrec-bench measures the library's own peak
    "nlohmann/": {"models", "apps"},
    "fmt/": {"models", "engine", "apps"},
    "sentencepiece": {"engine"},
    "pcre2.h": {"engine"},
    "xxhash.h": {"kernels"},
    "cxxopts.hpp": {"apps"},
    "seccomp.h": {"apps"},
    "nanobind/": {"engine"},  # engine/python alone
    "cuda": {"kernels", "models", "apps"},  # models: kernels that know the model; apps: what the device can do
    "cublas": {"kernels"},
}

# What files of a layer may not include of their own layer or the next: (files, includes, files that may), each as the
# beginning of a path.
KEPT_APART = [
    (r"kernels/[^/]+$", r"kernels/.+/", None),  # what both backends share knows neither
    (r"kernels/cpu/", r"kernels/cuda/", None),
    (r"kernels/cuda/", r"kernels/cpu/", None),
    (r"models/files/", r"models/(?!files/)", None),  # files of any model
    (r"models/weights/", r"models/(?!files/|weights/)", None),  # weights of any architecture
    (r"models/runtime/", r"models/(?!files/|weights/|runtime/)", None),  # what runs any architecture
    (r"models/mmrec_jax/", r"models/mmrec/", None),
    (r"models/mmrec/paths/", r"models/mmrec/(stack|net)\.h", None),  # a path knows nobody who drives it
    (r"models/mmrec/", r"models/mmrec/paths/", r"models/mmrec/(paths/|stack\.h)"),  # nor does the reference know a path
    (r"models/", r"(kernels|models(/\w+)?)/cuda/", r"models/(\w+/)?cuda/"),
    (r"engine/", r"models/(\w+/)?cuda/", None),
    (r"engine/python/", r"(engine/(?!python/)|models/|kernels/)", None),  # Python's module sees the public headers alone
    (r"engine/(?!python/)", r"(engine/python|nanobind)/", None),
]

# The rooms of kernels/cuda: a folder with all below it, or a file. Each may include those of lines above it, and no
# other of its own line.
CUDA_ROOMS = [
    ["kernels/cuda/runtime/"],
    ["kernels/cuda/isa/"],
    ["kernels/cuda/"],  # the files of the folder itself: elements, exchange between blocks
    ["kernels/cuda/recurrence/equations.cuh"],  # one channel in registers: decay and norms are of it
    ["kernels/cuda/rows/"],
    ["kernels/cuda/gemm/"],
    ["kernels/cuda/scan/", "kernels/cuda/recurrence/", "kernels/cuda/attention/", "kernels/cuda/logprobs/",
     "kernels/cuda/sample/"],
]


def kept_apart(path, include):
    """Whether `path`, from the root on, must not include `include`."""
    return any(re.match(files, path) and re.match(others, include) and not (but and re.match(but, path))
               for files, others, but in KEPT_APART)


def cuda_room(path):
    """(line in CUDA_ROOMS, room) of a path; None outside of kernels/cuda. The longest name that fits is the room."""
    fitting = [(room, line) for line, rooms in enumerate(CUDA_ROOMS) for room in rooms if path.startswith(room)]
    room, line = max(fitting, key=lambda fit: len(fit[0]), default=(None, None))
    return None if room is None else (line, room)


def points_up(path, include):
    """Whether an include from room to room of kernels/cuda goes against their order."""
    source, target = cuda_room(path), cuda_room(include)
    return source is not None and target is not None and source[1] != target[1] and source[0] <= target[0]


class Source:
    """A source or header of a layer."""

    def __init__(self, layer, path):
        self.layer, self.path, self.name = layer, path, str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")
        self.includes = INCLUDE.findall(self.text)  # (opening delimiter, name)


SOURCES = [Source(layer, path) for layer in LAYERS for path in sorted((ROOT / layer).rglob("*")) if path.suffix in SUFFIXES]


def public_header(include):
    """(layer, path) of "mmrec/x.h": the layer whose include folder has it, the engine's if none has."""
    for layer in LAYERS:
        for suffix in ["", ".in"]:  # .in: made from it when the project is configured
            path = ROOT / layer / "include" / (include + suffix)
            if path.is_file():
                return layer, path
    return "engine", ROOT / "engine/include" / include


def layer_of(include):
    first = include.split("/")[0]
    return public_header(include)[0] if first == "mmrec" else first


def upward_includes(layer, text):
    """Quoted includes of `text`, a file of `layer`, that name no layer at or to the right of it."""
    allowed = LAYERS[LAYERS.index(layer):]
    return [name for kind, name in INCLUDE.findall(text) if kind == '"' and layer_of(name) not in allowed]


class LayeringTest(unittest.TestCase):
    def expect_none(self, wrong):
        self.assertEqual(sorted(wrong), [])

    def test_every_layer_has_sources(self):
        self.assertEqual({source.layer for source in SOURCES}, set(LAYERS))

    def test_includes_point_rightward(self):
        self.expect_none((source.name, include) for source in SOURCES for include in upward_includes(source.layer, source.text))

    def test_an_upward_include_is_seen(self):
        text = '#include <vector>\n#include "kernels/tensor.h"\n  # include "mmrec/model.h"\n#include "apps/common/cli.h"\n'
        self.assertEqual(upward_includes("models", text), ["mmrec/model.h", "apps/common/cli.h"])
        self.assertEqual(upward_includes("kernels", '#include "models/mmrec/config.h"'), ["models/mmrec/config.h"])
        text = '#include "mmrec/session.h"\n#include "mmrec/prefill.h"\n#include "mmrec/sampler_options.h"\n'
        self.assertEqual(upward_includes("models", text), ["mmrec/session.h"])
        self.assertEqual(upward_includes("kernels", text), ["mmrec/session.h", "mmrec/prefill.h"])
        self.assertEqual(upward_includes("apps", text), [])

    def test_rooms_within_a_layer_keep_apart_and_point_one_way(self):
        self.expect_none((source.name, include) for source in SOURCES for kind, include in source.includes
                         if (kind == '"' or include.startswith("nanobind/"))
                         and (kept_apart(source.name, include) or points_up(source.name, include)))

    def test_every_folder_of_kernels_cuda_is_a_room(self):
        folders = {f"kernels/cuda/{p.name}/" for p in (ROOT / "kernels/cuda").iterdir() if p.is_dir()}
        named = {room for rooms in CUDA_ROOMS for room in rooms if room.count("/") == 3 and room.endswith("/")}
        self.assertEqual(folders, named)

    def test_a_wrong_include_between_rooms_is_seen(self):
        self.assertTrue(kept_apart("kernels/cpu/a.cpp", "kernels/cuda/element.cuh"))
        self.assertTrue(kept_apart("kernels/tensor.h", "kernels/cpu/cpu.h"))
        self.assertTrue(kept_apart("models/files/json.h", "models/mmrec/config.h"))
        self.assertTrue(kept_apart("models/files/json.h", "models/runtime/executor.h"))
        self.assertFalse(kept_apart("models/files/json.h", "models/files/text.h"))
        for include in ["kernels/cuda/runtime/cuda.h", "models/mmrec/cuda/ops.h"]:
            self.assertTrue(kept_apart("models/mmrec/weights.h", include))
            self.assertTrue(kept_apart("models/runtime/executor.h", include))
            self.assertFalse(kept_apart("models/mmrec/cuda/decode/a.cu", include))
        self.assertTrue(kept_apart("models/mmrec/block.h", "models/mmrec/paths/rows.h"))
        self.assertTrue(kept_apart("models/mmrec/paths/rows.h", "models/mmrec/stack.h"))
        self.assertFalse(kept_apart("models/mmrec/paths/rows.h", "models/mmrec/block.h"))
        self.assertTrue(kept_apart("engine/session/model.cpp", "models/mmrec/cuda/weights.h"))
        self.assertFalse(kept_apart("engine/session/model.cpp", "models/mmrec/executors.h"))
        self.assertTrue(points_up("kernels/cuda/runtime/a.h", "kernels/cuda/isa/ptx.cuh"))
        self.assertTrue(points_up("kernels/cuda/rows/a.cu", "kernels/cuda/recurrence/gated_tile.cuh"))
        self.assertFalse(points_up("kernels/cuda/rows/a.cu", "kernels/cuda/recurrence/equations.cuh"))
        self.assertTrue(points_up("kernels/cuda/element.cuh", "kernels/cuda/rows/rows.cuh"))
        self.assertTrue(points_up("kernels/cuda/scan/a.cu", "kernels/cuda/attention/a.cuh"))
        self.assertFalse(points_up("kernels/cuda/gemm/a.cu", "kernels/cuda/gemm/b.h"))
        self.assertFalse(points_up("models/mmrec/cuda/a.cu", "kernels/cuda/gemm/b.h"))

    def test_included_files_exist_under_the_name_used(self):
        self.expect_none((source.name, name) for source in SOURCES for kind, name in source.includes if kind == '"'
                         and not (public_header(name)[1] if name.startswith("mmrec/") else ROOT / name).is_file())

    def test_no_folder_is_listed_by_what_ends_the_process_without_memory(self):
        """Steps of libstdc++'s directory_iterator allocate where they must not throw."""
        self.expect_none(source.name for source in SOURCES if "directory_iterator" in re.sub("//.*", "", source.text))

    def test_a_file_of_over_400_lines_says_why_it_is_long(self):
        paths = [path for folder in [*LAYERS, "tests"] for path in (ROOT / folder).rglob("*") if path.suffix in {*SUFFIXES, ".py"}]
        texts = {path: path.read_text(encoding="utf-8").splitlines() for path in paths}
        self.expect_none(str(path.relative_to(ROOT)) for path, lines in texts.items()
                         if len(lines) > 400 and not re.search(r"\bLong(er)?\b", "\n".join(lines[:12])))

    def test_public_headers_have_one_home(self):
        names = [p.name for layer in LAYERS for p in (ROOT / layer / "include").rglob("*.h*")]
        self.assertEqual(sorted(names), sorted(set(names)))

    def test_apps_reach_the_engine_through_its_public_headers(self):
        """Programs share out work by the threads of the host. The benches also measure synthetic models, and bare ops."""
        beyond = r"models/(?!files/)|kernels/(?!cpu/(parallel_items|thread_pool)\.h)"
        self.expect_none((source.name, name) for source in SOURCES if source.layer == "apps" for _, name in source.includes
                         if name.startswith("engine/")
                         or (source.path.parent.name != "bench" and re.match(beyond, name)))

    def test_public_headers_need_only_the_standard_library(self):
        headers = sorted(p for layer in LAYERS for p in (ROOT / layer / "include/mmrec").rglob("*.h*"))
        self.assertGreater(len(headers), 0)
        self.expect_none((path.name, name) for path in headers for kind, name in INCLUDE.findall(path.read_text(encoding="utf-8"))
                         if not (STANDARD.fullmatch(name) if kind == "<" else name.startswith("mmrec/")))

    def test_third_party_headers_stay_in_their_layers(self):
        self.expect_none((source.name, name) for source in SOURCES for _, name in source.includes
                         for prefix, layers in THIRD_PARTY.items() if name.startswith(prefix) and source.layer not in layers)

    def test_library_code_has_no_hidden_effects(self):
        """The library never aborts, exits, prints, reads the environment or installs a signal handler."""
        forbidden = re.compile(
            r"(?<![\w.:>])(?:std::)?(?:abort|exit|_exit|quick_exit|terminate|getenv|setlocale|signal|sigaction|printf|"
            r"fprintf|puts|putchar)\s*\(|std::(?:cout|cerr|clog)\b|fmt::print\s*\(")
        self.expect_none((source.name, number, line) for source in SOURCES if source.layer != "apps"
                         for number, line in enumerate(source.text.splitlines(), 1) if forbidden.search(line.split("//")[0]))

    def test_headers_are_guarded(self):
        self.expect_none(source.name for source in SOURCES if source.path.suffix in {".h", ".cuh"}
                         and "\n#pragma once\n" not in source.text)

    def test_files_open_with_their_purpose(self):
        """A header speaks for its source."""
        self.expect_none(source.name for source in SOURCES if not source.text.startswith("//")
                         and (source.path.suffix == ".h" or not source.path.with_suffix(".h").is_file()))


if __name__ == "__main__":
    unittest.main()
