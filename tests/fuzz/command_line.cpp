// Any words on a program's command line are refused as wrong usage, or make a command with all numbers in their ranges.
// The first byte of the input chooses the program. The words follow, with a zero byte between two.
#include <algorithm>
#include <cmath>
#include <limits>

#include "apps/common/arguments.h"
#include "apps/common/model_folder.h"
#include "apps/generate/options.h"
#include "apps/ppl/options.h"
#include "mmrec/sampler.h"
#include "tests/fuzz/harness.h"

namespace {

namespace apps = mmrec::apps;
using mmrec::fuzz::require;

constexpr std::size_t kMostWords = 64;

void check_run(const apps::RunOptions& run) {
  require(run.gpu >= 0 && run.session.threads >= 0);
  require(std::isfinite(run.session.sweep_tolerance) && run.session.sweep_tolerance >= 0.0F);
}

void generate(const apps::Arguments& arguments) {
  const apps::GenerateCommand command = apps::generate_command(arguments);
  check_run(command.run);
  const mmrec::Sampler takes(command.options.sampler);
  require(command.options.max_tokens >= -1 && command.num_samples >= 1 && command.prefix_cache_mb >= 1);
  require(!(command.prompt && command.file) && !(command.quiet && command.verbose));
  for (const std::string& stop : command.options.stop) require(!stop.empty());
}

void ppl(const apps::Arguments& arguments) {
  const apps::PplOptions options = apps::ppl_options(arguments);
  check_run(options.run);
  require(!options.corpus.files.empty() && options.batch >= 0);
  require(options.corpus.shard >= 0 && options.corpus.shard < options.corpus.shards);
  const mmrec::WindowOptions& windows = options.windows;
  require((windows.mode == mmrec::WindowMode::kFull) == (windows.window == 0));
  if (windows.mode == mmrec::WindowMode::kStrided) require(windows.stride >= 1 && windows.stride <= windows.window);
}

/// Every option by each of the ways there are to read one.
void read_all(const apps::Arguments& arguments, std::span<const apps::Option> options) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const apps::Option& option : options) {
    const std::string_view name = option.name;
    const auto reads = [](const auto& read) { mmrec::fuzz::takes<apps::UsageError>(read); };
    reads([&] { require(arguments.integer(name, 5, 1, kMost) >= 1); });
    reads([&] { require(!arguments.integers(name, {7}, -3, 9).empty()); });
    reads([&] { require(arguments.real(name, 0.0F, 1.0F, true).value_or(0.5F) > 0.0F); });
    reads([&] { require(arguments.unsigned64(name).has_value() == arguments.has(name)); });
    reads([&] { require(arguments.file(name).value_or("x") != ""); });
    reads([&] {
      const std::vector<std::string_view> words = apps::split(option.value.choices);
      if (!words.empty()) require(arguments.choice(name, words) < words.size());
    });
  }
}

}  // namespace

MMREC_FUZZ(command_line) {
  if (input.empty()) return;
  const int program = mmrec::fuzz::take_byte(input) % 4;
  std::vector<std::string> words = {"program"};
  while (!input.empty() && words.size() < kMostWords) {
    const std::string_view word = input.substr(0, input.find('\0'));
    words.emplace_back(word);
    input.remove_prefix(std::min(word.size() + 1, input.size()));
  }
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const int argc = static_cast<int>(argv.size());
  argv.push_back(nullptr);

  const auto parsed = [&](const apps::Program& of) { return apps::Arguments(of, argc, argv.data()); };
  try {
    switch (program) {
      case 0:
        return generate(parsed(apps::generate_program()));
      case 1:
        return ppl(parsed(apps::ppl_program()));
      case 2:
        return read_all(parsed(apps::merge_program()), apps::merge_program().options);
      default:
        const apps::Arguments arguments = parsed(apps::program("mmrec-bench"));
        read_all(arguments, apps::program("mmrec-bench").options);
        check_run(apps::run_options(arguments));
    }
  } catch (const apps::UsageError& error) {
    mmrec::fuzz::require_line(apps::printable(error.what()));
  } catch (const apps::RejectedFile&) {  // there is no bundled model
  }
}
