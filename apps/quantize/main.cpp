// mmrec-quantize: writes a model folder with smaller weights, and prints what that costs in accuracy.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "apps/common/arguments.h"
#include "apps/common/cli.h"
#include "apps/common/model_folder.h"
#include "apps/common/output.h"
#include "apps/common/progress.h"
#include "apps/quantize/options.h"
#include "mmrec/quantize.h"

namespace mmrec::apps {
namespace {

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

int quantize_main(const Arguments& arguments) {
  QuantizeCommand command = quantize_command(arguments);
  Output out;
  Progress progress(Progress::Elsewhere::kLines, !command.quiet, ProgressUnit::kBytes);
  command.options.on_progress = [&](std::uint64_t done, std::uint64_t total) {
    progress.update(static_cast<std::int64_t>(done), static_cast<std::int64_t>(total));
    return interrupt_exit_code() == 0;
  };
  QuantizedModel model;
  try {
    const GracefulScope graceful;
    read_folder(command.from, {}, [&] { model = quantize_model(command.from, command.to, command.options); });
  } catch (const std::invalid_argument& error) {
    throw UsageError(error.what());
  }
  progress.clear();
  if (!model.complete) {
    log_line("interrupted: nothing was written");
    return interrupt_exit_code();
  }
  out.write(report(model));
  out.commit();
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  using namespace mmrec::apps;
  return run_command(quantize_program(), argc, argv, quantize_main);
}
