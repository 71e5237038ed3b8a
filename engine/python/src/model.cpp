// mmrec.Model: loading, what it is, sessions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

constexpr std::array<std::string_view, 4> kPrecisions = {"auto", "fp32", "fp16", "bf16"};  // in the order of Precision

/// The place of a name among `names`. Throws std::invalid_argument naming them.
template <std::size_t N>
std::size_t choice(nb::handle given, const char* option, const std::array<std::string_view, N>& names) {
  const std::string_view name = text_of(given, option);
  std::string expected;
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return i;
    expected += (i == 0 ? "" : i + 1 == N ? " or " : ", ") + std::string(names[i]);
  }
  throw std::invalid_argument(std::string(option) + ": found '" + std::string(name) + "', expected " + expected);
}

/// "auto", "cpu", "cuda" or "cuda:N".
void read_device(nb::handle given, LoadOptions& load) {
  const std::string name(text_of(given, "device"));
  if (name == "auto" || name == "cpu" || name == "cuda") {
    load.device = name == "auto" ? Device::kAuto : name == "cpu" ? Device::kCpu : Device::kCuda;
    return;
  }
  const std::string digits = name.starts_with("cuda:") ? name.substr(5) : "";
  if (digits.empty() || digits.size() > 4 || digits.find_first_not_of("0123456789") != std::string::npos) {
    throw std::invalid_argument("device: found '" + name + "', expected auto, cpu, cuda or cuda:N");
  }
  load.device = Device::kCuda;
  load.gpu = std::stoi(digits);
}

/// The options of Model.load by name. Warnings go to on_warning, or to Python's warnings.
LoadOptions take_load_options(nb::dict& options) {
  LoadOptions load;
  if (const nb::object given = take(options, "device"); given.is_valid()) read_device(given, load);
  if (const nb::object given = take(options, "precision"); given.is_valid()) {
    load.precision = static_cast<Precision>(choice(given, "precision", kPrecisions));
  }
  take_into(options, "threads", load.threads);
  take_into(options, "allow_nonfinite", load.allow_nonfinite);
  if (const nb::object given = take(options, "expert"); given.is_valid() && !given.is_none()) {
    load.variant.expert = static_cast<Expert>(choice(given, "expert", kExpertNames));
  }
  if (const nb::object given = take(options, "calls"); given.is_valid() && !given.is_none()) {
    load.variant.calls = static_cast<Calls>(choice(given, "calls", kCallsNames));
  }
  bool bank = false;
  if (options.contains("bank") && !nb::object(options["bank"]).is_none()) {
    take_into(options, "bank", bank);
    load.variant.bank = bank;
  }
  take(options, "bank");  // of None
  return load;
}

/// Calls on_warning, or warnings.warn where it is None. Used while the caller's frame holds a reference to it.
std::function<void(std::string_view)> warner(nb::handle on_warning) {
  return [on_warning](std::string_view text) {
    const Gil gil;
    const nb::str line(text.data(), text.size());
    if (on_warning.is_valid() && !on_warning.is_none()) {
      on_warning(line);
    } else if (PyErr_WarnEx(PyExc_UserWarning, line.c_str(), 1) != 0) {
      nb::raise_python_error();
    }
  };
}

PyModel load(const nb::object& path, nb::kwargs options) {
  const nb::object on_warning = take(options, "on_warning");
  const auto kept = nb::borrow<nb::dict>(options.attr("copy")());
  LoadOptions load = take_load_options(options);
  expect_no_more(options, "load");
  load.on_warning = warner(on_warning);
  const std::filesystem::path folder = path.is_none() ? bundled_model() : path_of(path);
  auto model = [&] {
    const NoGil released;
    return Model::load(folder, load);
  }();
  return {std::move(model), folder, kept};
}

nb::list load_on_gpus(const nb::object& path, const nb::object& gpus, nb::kwargs options) {
  const nb::object on_warning = take(options, "on_warning");
  const auto kept = nb::borrow<nb::dict>(options.attr("copy")());
  LoadOptions load = take_load_options(options);
  expect_no_more(options, "load_on_gpus");
  load.on_warning = warner(on_warning);
  const std::filesystem::path folder = path.is_none() ? bundled_model() : path_of(path);
  const std::vector<int> numbers = gpus.is_none() ? std::vector<int>() : row_of(gpus, "gpus");
  auto models = [&] {
    const NoGil released;
    return Model::load_on_gpus(folder, load, numbers);
  }();
  nb::list result;
  for (Model& model : models) {
    const auto own = nb::borrow<nb::dict>(kept.attr("copy")());
    own["device"] = nb::str(("cuda:" + std::to_string(model.info().gpu)).c_str());
    result.append(nb::cast(PyModel{std::move(model), folder, own}));
  }
  return result;
}

nb::object info(const PyModel& self) {
  const ModelInfo& info = self.model.info();
  nb::dict fields;
  fields["architecture"] = info.architecture.c_str();
  fields["vocab_size"] = info.vocab_size;
  fields["model_dim"] = info.model_dim;
  fields["num_layers"] = info.num_layers;
  fields["num_heads"] = info.num_heads;
  fields["ffn_dim"] = info.ffn_dim;
  fields["memory_segment"] = info.memory_segment;
  fields["memory_slots"] = info.memory_slots;
  const auto name = [](auto names, auto option) -> nb::object {
    if (!option) return nb::none();
    const std::string_view text = names[static_cast<std::size_t>(*option)];
    return nb::str(text.data(), text.size());
  };
  fields["expert"] = name(kExpertNames, info.variant.expert);
  fields["calls"] = name(kCallsNames, info.variant.calls);
  fields["bank"] = info.variant.bank ? nb::object(nb::bool_(*info.variant.bank)) : nb::object(nb::none());
  fields["parameters"] = info.parameters;
  fields["weight_bytes"] = info.weight_bytes;
  fields["bytes_per_token"] = info.bytes_per_token;
  fields["memory_bytes"] = info.memory_bytes;
  fields["fingerprint"] = info.fingerprint;
  fields["bos_token_id"] = info.bos_token_id;
  nb::list eos;
  for (const int id : info.eos_token_ids) eos.append(id);
  fields["eos_token_ids"] = nb::tuple(eos);
  fields["device"] = info.device == Device::kCuda ? "cuda" : "cpu";
  fields["gpu"] = info.gpu;
  fields["device_name"] = info.device_name.c_str();
  const std::string_view precision = to_string(info.precision);
  fields["precision"] = nb::str(precision.data(), precision.size());
  return nb::module_::import_("mmrec._results").attr("ModelInfo")(**fields);
}

PySession* new_session(const PyModel& self, nb::handle batch, nb::kwargs options) {
  const int sequences = integer_of<int>(batch, "batch");
  const SessionOptions given = take_session_options(options);
  expect_no_more(options, "new_session");
  std::shared_ptr<Session> session;
  {
    const NoGil released;
    session = std::make_shared<Session>(self.model.new_session(sequences, given));
  }
  return new PySession(std::move(session), self.model.info().eos_token_ids);
}

nb::object reduce(const PyModel& self) {
  return nb::make_tuple(nb::module_::import_("mmrec._results").attr("load_model_again"),
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
