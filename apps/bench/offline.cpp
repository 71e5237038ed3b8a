#include "apps/bench/offline.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <span>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "apps/bench/run.h"
#include "apps/common/arguments.h"
#include "apps/common/cli.h"
#include "apps/common/output.h"
#include "apps/common/stopwatch.h"
#include "models/files/interrupted.h"

namespace mmrec::apps {
namespace {

/// `text` without its last end of line, from behind the one before.
std::string_view last_line(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  return text.substr(text.rfind('\n') + 1);
}

/// A program that runs, its stdout a file. It ends with this object.
class Child {
 public:
  Child(std::vector<std::string> words, const std::filesystem::path& out) : name_(words.front()) {
    std::array<int, 2> ends = {};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
    err_ = ends[0];
    std::vector<char*> arguments(words.size() + 1);  // the last is null
    std::transform(words.begin(), words.end(), arguments.begin(), [](std::string& word) { return word.data(); });
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&files, ends[1], STDERR_FILENO);
    const int error = posix_spawn(&pid_, name_.c_str(), &files, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    (void)close(ends[1]);
    if (error == 0) return;
    (void)close(err_);
    throw std::system_error(error, std::generic_category(), name_ + ", which --offline runs");
  }
  ~Child() {
    (void)close(err_);
    if (pid_ < 0) return;
    (void)kill(pid_, SIGKILL);
    (void)end();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Waits for its end. Returns what it said on stderr. Throws as run_offline().
  std::string wait() {
    std::string said;
    std::array<char, 4096> block = {};
    for (ssize_t n = 1; n != 0;) {
      check_interrupt();
      pollfd waits = {err_, POLLIN, 0};
      if (poll(&waits, 1, kMilliseconds) <= 0) continue;  // a signal comes through at once
      n = read(err_, block.data(), block.size());
      if (n > 0) said.append(block.data(), static_cast<std::size_t>(n));
    }
    const int status = end();
    check_interrupt();  // Ctrl-C goes to both
    if (status == 0) return said;
    throw std::runtime_error(fmt::format("{} {}: {}", name_,
                                         WIFSIGNALED(status)
                                             ? fmt::format("was ended by signal {}", WTERMSIG(status))
                                             : fmt::format("ended with exit code {}", WEXITSTATUS(status)),
                                         last_line(said)));
  }

 private:
  static constexpr int kMilliseconds = 100;  // in which a signal that came between check and poll is noticed

  int end() {
    int status = 0;
    (void)models::uninterrupted([&] { return waitpid(pid_, &status, 0); });
    pid_ = -1;
    return status;
  }

  std::string name_;
  pid_t pid_ = -1;
  int err_ = -1;
};

/// T of the program's last line, "... | N prompts, T tokens in ...".
std::int64_t drawn_tokens(std::string_view said) {
  const std::string_view line = last_line(said);
  const std::string_view before = line.substr(0, std::min(line.find(" tokens in "), line.size()));
  const auto drawn = parse_integer(before.substr(before.rfind(' ') + 1));
  if (!drawn) throw std::runtime_error(fmt::format("mmrec-generate does not say how much it drew: {}", line));
  return *drawn;
}

void write_prompts(const std::filesystem::path& path, std::span<const ServedRequest> requests, std::int64_t tokens) {
  Output file(path);
  for (const ServedRequest& request : requests) {
    file.write(fmt::format("{{\"prompt\":[{}],\"max_tokens\":{}}}\n", fmt::join(request.prompt, ","), tokens));
  }
  file.commit();
}

}  // namespace

OfflineRun run_offline(const std::filesystem::path& folder, const OfflinePlan& plan,
                       const std::vector<ServedRequest>& requests, std::int64_t tokens) {
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe").replace_filename("mmrec-generate");
  const std::filesystem::path prompts = plan.scratch / kPromptsFile;
  std::vector<std::string> words = {program, "-m", std::filesystem::absolute(folder), "--jsonl", prompts};
  words.insert(words.end(), plan.options.begin(), plan.options.end());
  OfflineRun run;
  const auto measure = [&](std::span<const ServedRequest> some, std::int64_t most) {
    write_prompts(prompts, some, most);
    const Stopwatch watch;
    run.drawn = drawn_tokens(Child(words, plan.scratch / kRecordsFile).wait());
    return watch.seconds();
  };
  const std::span one = std::span(requests).first(1);
  run.mean_prompt = mean_prompt(requests);
  const double first_load = measure(one, 1);  // files that are not in the page cache yet come into it
  run.load_seconds = std::min(first_load, measure(one, 1));
  run.seconds = measure(requests, tokens);
  return run;
}

void give_tokenizer(const std::filesystem::path& folder, std::int64_t vocab) {
  if (std::filesystem::exists(Tokenizer::file_of(folder))) return;
  Output file(folder / kTokenizerFile);
  file.write(made_up_pieces(vocab));
  file.commit();
}

}  // namespace mmrec::apps
