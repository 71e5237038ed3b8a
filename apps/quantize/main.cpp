// mmrec-quantize: writes a model folder with smaller weights, and prints what that costs in accuracy.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "apps/common/arguments.h"
#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/model_folder.h"
#include "apps/common/named_files.h"
#include "apps/common/output.h"
#include "apps/common/progress.h"
#include "mmrec/errors.h"
#include "mmrec/model.h"
#include "mmrec/quantize.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"
#include "models/files/file.h"
#include "models/files/model_files.h"

namespace mmrec::apps {
namespace {

struct QuantizeCommand {
  std::filesystem::path from, to;
  QuantizeOptions options;
  std::optional<std::string> calibrate, eval;  // texts
  RunOptions run;
  bool quiet = false;
};

/// Throws UsageError.
QuantizeCommand quantize_command(const Arguments& arguments) {
  QuantizeCommand command;
  const std::vector<std::string>& folders = arguments.positionals();
  if (folders.size() != 2) throw UsageError("expected two folders: DIR and OUT");
  command.from = folders[0];
  command.to = folders[1];
  if (!arguments.has("format")) throw UsageError("--format is missing (expected int8, int4 or fp8)");
  command.options.type = static_cast<QuantizedType>(arguments.choice("format", kQuantizedTypeNames));
  arguments.refuse_unless(command.options.type == QuantizedType::kInt4, {"group"}, "only with --format int4");
  command.options.group = static_cast<int>(arguments.integer("group", command.options.group, 64, 65536));
  command.options.keep = arguments.list("keep");
  command.calibrate = arguments.file("calibrate");
  command.eval = arguments.file("eval");
  command.run = run_options(arguments);
  command.options.threads = command.run.session.threads;
  command.quiet = arguments.has("quiet");
  refuse_lost_files(named_files(arguments, program("mmrec-quantize").options));
  return command;
}

double bits(std::uint64_t bytes, std::uint64_t weights) {
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(weights);
}

std::uint64_t weights_of(const QuantizedMatrix& matrix) {
  return static_cast<std::uint64_t>(matrix.rows * matrix.cols);
}

/// A line for each matrix, then the figures of all.
std::string report(const QuantizedModel& model) {
  std::size_t width = 0;
  std::uint64_t bytes = 0;
  std::uint64_t weights = 0;
  for (const QuantizedMatrix& matrix : model.matrices) {
    width = std::max(width, matrix.name.size());
    bytes += matrix.bytes;
    weights += weights_of(matrix);
  }
  std::string text;
  for (const QuantizedMatrix& matrix : model.matrices) {
    const std::string group = matrix.group == 0 ? "" : fmt::format(" g{}", matrix.group);
    text += fmt::format("{:<{}}  {:<9}  {:>13}  error {:.5f}  {:.3f} bits\n", printable(matrix.name), width,
                        std::string(to_string(matrix.type)) + group, fmt::format("{} x {}", matrix.rows, matrix.cols),
                        matrix.error, bits(matrix.bytes, weights_of(matrix)));
  }
  text += fmt::format("bits_per_quantized_weight  {:.3f}\n", bits(bytes, weights));
  text += fmt::format("bits_per_weight            {:.3f}\n", bits(model.bytes_after, model.parameters));
  text += fmt::format("bytes_before               {}\n", model.bytes_before);
  return text + fmt::format("bytes_after                {}\n", model.bytes_after);
}

/// Token ids of the text of file `name`, one besides BOS at least.
std::vector<int> tokens_of(const QuantizeCommand& command, const std::string& name) {
  std::optional<Tokenizer> tokenizer;
  read_folder(command.from, command.run, [&] { tokenizer = Tokenizer::load(command.from); });
  const std::string text = read_input(name);
  if (text.empty()) throw RejectedFile(input_name(name) + ": found no text, expected some");
  return tokenizer->encode(text, true, {}, command.options.threads);
}

/// A calibration on less text than this says nothing of some of a matrix' inputs.
void warn_of_little_text(const QuantizeOptions& options, const QuantizedModel& model) {
  std::int64_t widest = 0;
  for (const QuantizedMatrix& matrix : model.matrices) widest = std::max(widest, matrix.cols);
  const std::int64_t tokens = std::ssize(options.calibration);
  if (tokens == 0 || tokens >= widest) return;
  warn(
      fmt::format("--calibrate: found {} tokens, fewer than the widest matrix has inputs ({}): the result can be "
                  "worse than without",
                  tokens, widest));
}

/// Writes the folder. Not complete: interrupted.
QuantizedModel quantize(QuantizeCommand& command) {
  if (command.calibrate) command.options.calibration = tokens_of(command, *command.calibrate);
  Progress reading(!command.quiet);
  Progress writing(!command.quiet, ProgressUnit::kBytes);
  command.options.on_calibration = [&](std::int64_t done, std::int64_t total) {
    reading.update(done, total);
    return interrupt_exit_code() == 0;
  };
  command.options.on_progress = [&](std::uint64_t done, std::uint64_t total) {
    reading.clear();
    writing.update(static_cast<std::int64_t>(done), static_cast<std::int64_t>(total));
    return interrupt_exit_code() == 0;
  };
  QuantizedModel model;
  try {
    const GracefulScope graceful;
    read_folder(command.from, command.run, [&] { model = quantize_model(command.from, command.to, command.options); });
  } catch (const std::invalid_argument& error) {
    throw UsageError(error.what());
  }
  return model;
}

/// Perplexity of a text, whole and exactly; none: interrupted.
std::optional<double> perplexity(const QuantizeCommand& command, const std::filesystem::path& folder,
                                 const std::vector<int>& ids) {
  Progress progress(!command.quiet);
  std::int64_t done = 0;
  const auto on_progress = [&](std::int64_t tokens, double) {
    progress.update(done += tokens, std::ssize(ids) - 1);
    return interrupt_exit_code() == 0;
  };
  const Model model = load_model(folder, command.run);
  const GracefulScope graceful;
  const std::vector<DocumentScore> scores =
      Scorer(model, {.session = command.run.session, .on_progress = on_progress}).score({&ids, 1});
  if (scores.empty() || !scores.front().complete) return std::nullopt;
  return sums_of(scores.front()).ppl();
}

/// Removes the model that was written, and its folder if that is new.
void remove_model(const std::filesystem::path& folder, bool is_new) {
  std::error_code ignored;
  for (const std::string& name : models::names_in(folder)) {
    if (models::is_model_file(name)) std::filesystem::remove(folder / name, ignored);
  }
  if (is_new) std::filesystem::remove(folder, ignored);
}

int quantize_main(const Arguments& arguments) {
  QuantizeCommand command = quantize_command(arguments);
  std::error_code ignored;
  const bool is_new = !std::filesystem::exists(command.to, ignored);
  Output out;
  std::vector<int> eval;
  if (command.eval) eval = tokens_of(command, *command.eval);
  const QuantizedModel model = quantize(command);
  if (!model.complete) {
    log_line("interrupted: nothing was written");
    return interrupt_exit_code();
  }
  try {
    out.write(report(model));
    warn_of_little_text(command.options, model);
    if (command.eval) {
      out.flush();
      const auto before = perplexity(command, command.from, eval);
      const auto after = before ? perplexity(command, command.to, eval) : std::nullopt;
      if (!after) {
        log_line("interrupted: the model was written");
        return interrupt_exit_code();
      }
      out.write(fmt::format("{:<27}{:.6f}\n{:<27}{:.6f}\n{:<27}{:+.3f} %\n", "ppl_before", *before, "ppl_after", *after,
                            "ppl_change", 100.0 * (*after / *before - 1.0)));
    }
    out.commit();
  } catch (const WriteError&) {
    remove_model(command.to, is_new);
    throw;
  }
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  using namespace mmrec::apps;
  return run_command(program("mmrec-quantize"), argc, argv, quantize_main);
}
