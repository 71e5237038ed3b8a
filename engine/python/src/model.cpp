// mmrec.Model: loading, its properties, sessions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

/// Takes one of `names` unless it is None.
template <class T>
void take_variant(nb::dict& options, const char* name, std::span<const std::string_view> names,
                  std::optional<T>& value) {
  const nb::str key(name);
  if (options.contains(key) && nb::object(options[key]).is_none()) take(options, name);
  if (const auto at = take_choice(options, name, names)) value = static_cast<T>(*at);
}

/// The arguments of Model.load. Must live as long as `options` are in use.
struct Loading {
  nb::object on_warning;  // None or absent: Python's warnings
  nb::dict kept;          // the other options
  LoadOptions options;
  std::filesystem::path folder;

  Loading(const char* call, nb::handle path, nb::dict given)
      : on_warning(take_given(given, "on_warning")),
        kept(nb::borrow<nb::dict>(given.attr("copy")())),
        folder(model_path(path)) {
    if (const nb::object device = take(given, "device"); device.is_valid()) {
      const std::string_view name = text_of(device, "device");
      if (!set_device(options, name)) {
        refuse("device", "found '" + std::string(name) + "', expected auto, cpu, cuda or cuda:N");
      }
    }
    if (const auto precision = take_choice(given, "precision", kPrecisionNames)) {
      options.precision = static_cast<Precision>(*precision);
    }
    take_into(given, "threads", options.threads);
    take_into(given, "allow_nonfinite", options.allow_nonfinite);
    take_variant(given, "expert", kExpertNames, options.variant.expert);
    take_variant(given, "calls", kCallsNames, options.variant.calls);
    take_into(given, "bank", options.variant.bank);
    expect_no_more(given, call);
    options.on_warning = [this](std::string_view text) {
      const Gil gil;
      if (on_warning.is_valid()) {
        on_warning(text);
      } else if (PyErr_WarnEx(PyExc_UserWarning, std::string(text).c_str(), 1) != 0) {
        nb::raise_python_error();
      }
    };
  }
  Loading(const Loading&) = delete;
  Loading& operator=(const Loading&) = delete;
};

PyModel load(nb::handle path, nb::kwargs options) {
  Loading loading("load", path, std::move(options));
  Model model = without_gil([&] { return Model::load(loading.folder, loading.options); });
  return {std::move(model), loading.folder, loading.kept};
}

std::vector<PyModel> load_on_gpus(nb::handle path, nb::handle gpus, nb::kwargs options) {
  Loading loading("load_on_gpus", path, std::move(options));
  const std::vector<int> numbers = gpus.is_none() ? std::vector<int>() : row_of(gpus, "gpus");
  std::vector<PyModel> result;
  for (Model& model : without_gil([&] { return Model::load_on_gpus(loading.folder, loading.options, numbers); })) {
    const auto own = nb::borrow<nb::dict>(loading.kept.attr("copy")());
    own["device"] = "cuda:" + std::to_string(model.info().gpu);
    result.push_back({std::move(model), loading.folder, own});
  }
  return result;
}

nb::object info(const PyModel& self) {
  const ModelInfo& info = self.model.info();
  const auto name = [](auto names, auto option) {
    return option ? std::optional(names[static_cast<std::size_t>(*option)]) : std::nullopt;
  };
  return result("ModelInfo")(
      info.architecture, info.vocab_size, info.model_dim, info.num_layers, info.num_heads, info.ffn_dim,
      info.memory_segment, info.memory_slots, name(kExpertNames, info.variant.expert),
      name(kCallsNames, info.variant.calls), info.variant.bank, info.parameters, info.weight_bytes,
      info.bytes_per_token, info.memory_bytes, info.fingerprint, info.bos_token_id,
      nb::tuple(nb::cast(info.eos_token_ids)), kDeviceNames[static_cast<std::size_t>(info.device)], info.gpu,
      info.device_name, to_string(info.precision));
}

PySession* new_session(const PyModel& self, nb::handle batch, nb::kwargs options) {
  const int sequences = integer_of<int>(batch, "batch");
  const SessionOptions given = take_session_options(options);
  expect_no_more(options, "new_session");
  auto session = without_gil([&] { return std::make_shared<Session>(self.model.new_session(sequences, given)); });
  return new PySession(std::move(session), self.model.info().eos_token_ids);
}

nb::object reduce(const PyModel& self) {
  return nb::make_tuple(result("load_model_again"),
                        nb::make_tuple(python_path(self.path), self.options, self.model.info().fingerprint));
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<PyModel> type(
      m, "Model",
      "An MM-Rec model. Immutable; any number of threads may use it, with sessions of their own.\n\n"
      "Pickled by path and options: another process loads the files again, and raises ModelError\n"
      "where they are not the same model any more.");
  type.def_static(
      "load", load, nb::call_guard<Call>(), nb::arg("path") = nb::none(), nb::arg("options"),
      "Loads a model folder: config.json and model.safetensors, or its shards. None: the bundled model.\n\n"
      "Options: device='auto' ('cpu', 'cuda', 'cuda:N'; 'cpu' loads no CUDA library), precision='auto' ('fp32', "
      "'fp16',\n"
      "'bf16'), threads=0 (that read; 0: all processors), allow_nonfinite=False, on_warning=None (a callable of one\n"
      "line; None: warnings.warn), and of some architectures expert='both'|'text'|'code',\n"
      "calls='stepwise'|'prompt'|'whole', bank=bool. Raises ModelError naming file, field, found and expected, "
      "OSError\n"
      "where a file cannot be read, DeviceUnavailable, CudaError, MemoryError, and ValueError for options.");
  type.def_static("load_on_gpus", load_on_gpus, nb::call_guard<Call>(), nb::arg("path") = nb::none(),
                  nb::arg("gpus") = nb::none(), nb::arg("options"),
                  "The same on several GPUs, for a Scorer or Generator to use together: a list of a model for each of\n"
                  "`gpus` (numbers), or for each that can be used. Files are read once.");
  type.def("new_session", new_session, nb::call_guard<Call>(), nb::arg("batch") = 1, nb::arg("options"),
           "A session of `batch` sequences at position 0, 1..65536.\n\n"
           "Options: threads=0 (0: all processors), prefill='auto' ('sweeps', 'steps'), sweep_tolerance=0.0,\n"
           "max_sweeps=64. Raises ValueError for one out of range, MemoryError, CudaError.");
  type.def_prop_ro("info", info, "What it is and where it runs: a ModelInfo.");
  type.def_prop_ro(
      "path", [](const PyModel& self) { return python_path(self.path); }, "The folder it was loaded from.");
  type.def("__repr__", [](const PyModel& self) {
    const ModelInfo& info = self.model.info();
    return "<mmrec.Model " + info.architecture + ", " + std::to_string(info.parameters) + " parameters, on " +
           info.device_name + " in " + std::string(to_string(info.precision)) + ">";
  });
  type.def("__reduce__", reduce);
}

}  // namespace mmrec::python
