// The programs under test, the folders they are run on, and what is expected of every refusal.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "tests/apps/process.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

inline const std::string kGenerate = MMREC_PROGRAM_FOLDER "/mmrec-generate";
inline const std::string kPpl = MMREC_PROGRAM_FOLDER "/mmrec-ppl";
inline const std::string kBench = MMREC_PROGRAM_FOLDER "/mmrec-bench";
inline const std::string kTiny = MMREC_FIXTURES "/tiny";
inline const std::string kIds = kTiny + "/ids.jsonl";
inline const std::string kUpstream = MMREC_FIXTURES "/upstream";

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_SANITIZERS(why) GTEST_SKIP() << (why)
#else
#define SKIP_UNDER_SANITIZERS(why) static_cast<void>(0)
#endif

/// The words of a line, which spaces separate.
inline Words split(const std::string& line) {
  std::istringstream in(line);
  return {std::istream_iterator<std::string>(in), {}};
}

/// `first` and then `more`.
inline Words words(Words first, const Words& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}
/// `first`, on the CPU unless `more` names a device, and `more`: what the programs promise is the same on a machine
/// with a GPU.
inline Words with_device(const Words& first, const Words& more) {
  const bool named = std::find(more.begin(), more.end(), "--device") != more.end();
  return words(named ? first : words(first, {"--device", "cpu"}), more);
}
inline Words generate_on_tiny(const Words& more) { return with_device({kGenerate, "-m", kTiny}, more); }
inline Words ppl_on_tiny(const Words& more) { return with_device({kPpl, "-m", kTiny}, more); }

/// `line` with so many kilobytes of address space.
inline Words limited(int kilobytes, const Words& line) {
  return words({"/bin/sh", "-c", "ulimit -v " + std::to_string(kilobytes) + "; exec \"$0\" \"$@\""}, line);
}

/// `text` again and again, until that has so many bytes.
inline std::string repeated(std::string_view text, std::size_t bytes) {
  std::string all;
  while (all.size() < bytes) all += text;
  return all;
}

/// A printed character of `text` from byte `from` on that is ASCII, so that it is UTF-8 alone, and no comma.
inline std::string ascii_of(const std::string& text, std::size_t from = 0) {
  const auto is_it = [](char c) { return c > ' ' && c < 127 && c != ','; };
  const auto at = std::find_if(text.begin() + static_cast<std::ptrdiff_t>(from), text.end(), is_it);
  EXPECT_NE(at, text.end()) << text;
  return {at, at == text.end() ? at : at + 1};
}

inline std::string joined(const Words& arguments) {
  std::string line;
  for (const std::string& argument : arguments) line += argument + " ";
  return line;
}

/// Runs of them, without input or with `input` piped into it.
inline Outcome generate(const Words& more, std::optional<std::string> input = {}) {
  return run(generate_on_tiny(more), std::move(input));
}
inline Outcome ppl(const Words& more, std::optional<std::string> input = {}) {
  return run(ppl_on_tiny(more), std::move(input));
}

/// A run of `line` that gets `signal` when it has printed `bytes`, or of 0 has had time to begin.
inline Outcome interrupted(const Words& line, std::size_t bytes, int signal = SIGINT) {
  Process process(line);
  EXPECT_TRUE(process.read_stdout(bytes));
  if (bytes == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
  process.send(signal);
  return process.wait();
}

/// A run of `line` and a pipe with a name, behind which `text` comes and no end. It gets `signal` when it has printed
/// `bytes`, or has had time to read.
inline Outcome interrupted_reading(const Words& line, std::string_view text, std::size_t bytes, int signal = SIGINT) {
  const TempFolder folder;
  const std::string fifo = folder / "fifo";
  EXPECT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  Process process(words(line, {fifo}));
  const int fd = ::open(fifo.c_str(), O_WRONLY | O_CLOEXEC);  // returns when the program has opened it
  EXPECT_EQ(::write(fd, text.data(), text.size()), std::ssize(text));
  EXPECT_TRUE(process.read_stdout(bytes));
  if (bytes == 0 && !text.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  process.send(signal);
  Outcome outcome = process.wait();
  (void)::close(fd);
  return outcome;
}

/// What `condition` waits for has come, or a minute has gone.
inline void wait_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 1200 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

inline std::ptrdiff_t files_in(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

/// Its permissions.
inline unsigned mode_of(const std::filesystem::path& file) {
  return static_cast<unsigned>(std::filesystem::status(file).permissions());
}

inline void copy_files(const std::filesystem::path& from, const std::filesystem::path& to,
                       std::initializer_list<const char*> names) {
  for (const char* name : names) std::filesystem::copy_file(from / name, to / name);
}

inline void expect_same(const Json& found, const Json& expected, std::initializer_list<const char*> keys,
                        const std::string& what = {}) {
  for (const char* key : keys) EXPECT_EQ(found.value(key, Json()), expected.value(key, Json())) << what << " " << key;
}

/// A refusal: this exit code, nothing on stdout, one line on stderr (after warnings) that says all of `says`.
inline void expect_refused(const Outcome& outcome, int code, std::initializer_list<std::string_view> says,
                           const std::string& what = {}) {
  EXPECT_EQ(outcome.code, code) << what << "\n" << outcome.err;
  EXPECT_EQ(outcome.out, "") << what;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << what << "\n" << outcome.err;
  SCOPED_TRACE(what);
  expect_says(outcome.err, says);
}

/// Command lines of `program` that are wrong usage, each with what the refusal says.
inline void expect_wrong_usage(const Words& program, const std::vector<std::pair<Words, std::string>>& lines) {
  const std::string name = std::filesystem::path(program.front()).filename().string() + ": ";
  for (const auto& [arguments, says] : lines) {
    expect_refused(run(words(program, arguments)), 2, {name, says, "Try: "}, joined(arguments));
  }
}

/// A line of JSON for each of the first `count` ids of each row of [B, T]; 0: all.
inline std::string id_lines(const ReferenceTensor& ids, std::int64_t count = 0) {
  std::string lines;
  for (std::int64_t b = 0; b < ids.dim(0); ++b) {
    const auto row = ids.integers.begin() + b * ids.dim(1);
    lines += Json(std::vector<int>(row, row + (count > 0 ? count : ids.dim(1)))).dump() + "\n";
  }
  return lines;
}

/// The JSON object on stdout of a run that went well.
inline Json json_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  Json json = Json::parse(outcome.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << outcome.out;
  return json;
}

/// What these print as JSON.
inline Json generate_json(const Words& more, std::optional<std::string> input = {}) {
  return json_of(generate(words(more, {"--json"}), std::move(input)));
}
inline Json ppl_json(const Words& more, std::optional<std::string> input = {}) {
  return json_of(ppl(words(more, {"--format", "json"}), std::move(input)));
}

inline Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The objects on stdout, one a line, of a run that ended with `code`.
inline std::vector<Json> jsonl_of(const Outcome& outcome, int code = 0) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_TRUE(outcome.out.empty() || outcome.out.ends_with('\n')) << "the last line has no end";
  std::vector<Json> objects;
  for (const std::string& line : lines_of(outcome.out)) {
    objects.push_back(Json::parse(line, nullptr, false));
    EXPECT_TRUE(objects.back().is_object()) << line;
  }
  return objects;
}

}  // namespace mmrec::test
