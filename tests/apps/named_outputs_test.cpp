// Every output of every program, by the option tables: inputs stay, no result is lost, and what cannot be written to is
// said before the work.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "apps/generate/options.h"
#include "apps/ppl/options.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

const std::string kLong(255, 'x');  // as long as a name may be

struct Program {
  Words line;  // what it is called with besides files
  std::span<const apps::Option> options;
  std::string input;  // something to read
};

std::vector<Program> programs() {
  return {{{kGenerate, "--device", "cpu", "-q", "-n", "1"}, apps::generate_program().options, "--file"},
          {{kPpl, "--device", "cpu", "-q", "--ids"}, apps::ppl_program().options, "--file"},
          {{kPpl, "merge"}, apps::merge_program().options, ""},
          {{kBench, "--device", "cpu"}, apps::program("mmrec-bench").options, ""}};
}

std::vector<std::string> options_that_name(const Program& program, apps::Names names) {
  std::vector<std::string> found;
  for (const apps::Option& option : program.options) {
    if (option.value.names == names && option.value.text == "FILE") found.push_back("--" + std::string(option.name));
  }
  return found;
}

/// `line` by a shell that does `redirection`, in `folder`.
Outcome run_in(const std::filesystem::path& folder, const Words& line, const std::string& redirection = {}) {
  return run(words({"/bin/bash", "-c", "cd '" + folder.string() + "'; exec \"$@\" " + redirection, "bash"}, line));
}

class NamedOutputs : public testing::Test {
 protected:
  std::filesystem::path make(std::string_view name, std::string_view bytes = "kept") {
    write_file(folder_ / name, bytes);
    return folder_ / name;
  }
  /// Names in the folder and what is in the files.
  std::set<std::string> contents() const {
    std::set<std::string> all;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      all.insert(entry.path().filename().string() +
                 (std::filesystem::is_regular_file(entry.path(), none) ? ": " + read_file(entry.path()) : ""));
    }
    return all;
  }
  TempFolder folder_;
};

TEST_F(NamedOutputs, ThatIsAnInputIsRefusedAndTheInputStays) {
  make("one");
  std::filesystem::create_hard_link(folder_ / "one", folder_ / "hard");
  std::filesystem::create_symlink("one", folder_ / "soft");
  const auto before = contents();
  int tried = 0;
  for (const Program& program : programs()) {
    std::vector<std::string> inputs = options_that_name(program, apps::Names::kInput);
    if (program.line[0] == kPpl) inputs.emplace_back();  // operands
    for (const std::string& output : options_that_name(program, apps::Names::kOutput)) {
      for (const std::string& input : inputs) {
        if (input == "--state-in" && output == "--state-out") continue;
        Words line = program.line;
        if (input == "--compare") line.insert(line.end(), {"--file", kIds});
        if (!input.empty()) line.push_back(input);
        for (const auto& [read, written] : std::vector<std::pair<std::string, std::string>>{
                 {"one", "one"}, {"one", "./hard"}, {"soft", "one"}, {"/dev/stdin", "soft"}, {"-", "one"}}) {
          if (read == "-" && input == "--state-in") continue;  // a file named "-"
          const Outcome outcome = run_in(folder_.path(), words(line, {read, output, written}), "<one");
          const bool is_other = input == "--jsonl" && output == "--state-out";
          expect_refused(outcome, 2, {is_other ? "not with --jsonl" : "same file as the input"},
                         input + " " + read + " " + output + " " + written);
          ++tried;
        }
      }
    }
    for (const char* file : {"config.json", "model.safetensors", "tokenizer.model"}) {
      if (program.line[1] == "merge") continue;
      std::filesystem::create_symlink(kTiny + "/" + file, folder_ / file);
      Words line = words(program.line, {"--model", kTiny, "--output", file});
      if (!program.input.empty()) line.insert(line.end(), {program.input, kIds});
      expect_refused(run_in(folder_.path(), line), 2, {"same file as the input --model"}, joined(line));
      std::filesystem::remove(folder_ / file);
    }
  }
  EXPECT_GE(tried, 50);
  expect_refused(run_in(folder_.path(), {kPpl, "--device", "cpu", "-m", kTiny, "one"}, ">>one"), 2, {"stdout"});
  EXPECT_EQ(contents(), before);
}

TEST_F(NamedOutputs, TwoOfOneFileAreRefused) {
  make("there");
  std::filesystem::create_symlink("new", folder_ / "link");
  const auto before = contents();
  for (const Program& program : programs()) {
    const std::vector<std::string> outputs = options_that_name(program, apps::Names::kOutput);
    for (const std::string& one : outputs) {
      for (const std::string& other : outputs) {
        if (one == other) continue;
        for (const auto& [first, second] : {std::pair{"new", "./new"}, {"there", "there"}, {"link", "new"}}) {
          const Words line = words(program.line, {program.input, kIds, one, first, other, second});
          expect_refused(run_in(folder_.path(), line), 2, {"same file as the output"}, joined(line));
        }
      }
    }
  }
  const Words line = words(ppl_on_tiny({"--ids", kIds}), {"--html", "there"});
  expect_refused(run_in(folder_.path(), line, ">>there"), 2, {"same file as the output", "stdout"});
  EXPECT_EQ(contents(), before);
  EXPECT_EQ(ppl({"--ids", kIds, "-o", "/dev/null", "--html", "/dev/null"}).code, 0);
}

TEST_F(NamedOutputs, WhereNothingCanBeWrittenAreExitFiveBeforeTheModelIsRead) {
  std::filesystem::create_symlink("loop", folder_ / "loop");
  std::filesystem::create_directory(folder_ / "folder");
  const int server = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {AF_UNIX, {}};
  (folder_ / "socket").string().copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(server, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  std::vector<std::string> places = {"loop", "folder", "folder/", "no/file", "new/", "socket", kLong + "x"};
  if (geteuid() != 0) {
    std::filesystem::permissions(make("read-only"), std::filesystem::perms::owner_read);
    places.emplace_back("read-only");
  }
  const auto before = contents();
  for (const Program& program : programs()) {
    for (const std::string& output : options_that_name(program, apps::Names::kOutput)) {
      Words line = words(program.line, {output, ""});
      if (program.line[1] != "merge") line.insert(line.end() - 2, {"--model", folder_.path()});
      if (program.line[0] == kGenerate) line.insert(line.end() - 2, {"--prompt", "x"});
      if (program.line[0] == kPpl) line.insert(line.end() - 2, kIds);
      for (const std::string& place : places) {
        line.back() = place;
        expect_refused(run_in(folder_.path(), line), 5, {place, program.line[0] == kGenerate ? "" : "cannot write"},
                       joined(line));
      }
    }
  }
  EXPECT_EQ(contents(), before);
  (void)close(server);
}

/// Runs that write all their outputs, by options with places behind them.
std::vector<std::pair<Words, std::vector<std::string>>> whole_runs(const TempFolder& folder) {
  const std::string records = folder / "records";
  write_file(records, ppl({"-q", "--ids", "--format", "jsonl", kIds}).out);
  return {{generate_on_tiny({"-q", "-p", "Alice", "-n", "4", "--seed", "1"}), {"--output", "--state-out"}},
          {ppl_on_tiny({"-q", "--ids", kIds}), {"--output", "--html", "--plot", "--save-logprobs"}},
          {{kPpl, "merge", records}, {"--output"}}};
}

TEST_F(NamedOutputs, AreWholeWhereverTheyCanBe) {
  const TempFolder elsewhere;
  std::filesystem::create_directory(elsewhere / "folder");
  for (const auto& [line, outputs] : whole_runs(folder_)) {
    std::vector<std::string> expected;
    for (const std::string& place :
         {std::string("new"), std::string("old"), std::string("link"), std::string("link to old"), kLong}) {
      Words all = line;
      std::vector<std::filesystem::path> files;
      const bool is_link = place.starts_with("link");
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const std::string name = std::string(place).replace(place.size() - 1, 1, std::to_string(i));
        const std::filesystem::path file = is_link ? elsewhere / "folder/" / name : elsewhere / name;
        if (is_link) std::filesystem::create_symlink("folder/" + name, elsewhere / name);
        if (place.ends_with("old")) write_file(file, "old");
        all.insert(all.end(), {outputs[i], elsewhere / name});
        files.push_back(file);
      }
      EXPECT_EQ(run(all).code, 0) << joined(all);
      for (std::size_t i = 0; i < files.size(); ++i) {
        expected.resize(outputs.size());
        const std::string found = read_file(files[i]);
        if (expected[i].empty()) expected[i] = found;
        EXPECT_FALSE(found.empty());
        EXPECT_TRUE(line[0] != kGenerate || found == expected[i]) << place << outputs[i];
        EXPECT_EQ(std::filesystem::is_symlink(elsewhere / files[i].filename().string()), is_link);
      }
    }
    for (const auto& entry : std::filesystem::directory_iterator(elsewhere.path())) {
      EXPECT_NE(entry.path().filename().string().front(), '.') << "a temporary file is left";
      if (!entry.is_directory()) std::filesystem::remove(entry.path());
    }
    for (const auto& entry : std::filesystem::directory_iterator(elsewhere / "folder")) std::filesystem::remove(entry);
  }
}

TEST_F(NamedOutputs, ArePipesWhereTheyNameOne) {
  for (const auto& [line, outputs] : whole_runs(folder_)) {
    for (const std::string& output : outputs) {
      if (output == "--state-out") continue;  // a regular file, or none
      const std::string way = output == "--output" ? "" : " -o /dev/null";
      for (const std::string place : {"/dev/stdout | cat >got", "/proc/self/fd/1 | cat >got", ">(cat >got)",
                                      "/dev/fd/3 3> >(cat >got)", "fifo & cat fifo >got; wait $!"}) {
        std::filesystem::remove(folder_ / "got");
        std::filesystem::remove(folder_ / "fifo");
        ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
        const std::string command = "set -o pipefail; cd '" + folder_.path().string() + "'; \"$@\"" + way + " " +
                                    output + " " + place + "; code=$?; wait; exit $code";
        const Outcome outcome = run(words({"/bin/bash", "-c", command, "bash"}, line));
        EXPECT_EQ(outcome.code, 0) << joined(line) << output << " " << place << outcome.err;
        const bool is_there = std::filesystem::exists(folder_ / "got");
        EXPECT_TRUE(is_there && !read_file(folder_ / "got").empty()) << joined(line) << output << " " << place;
      }
    }
  }
}

TEST_F(NamedOutputs, ThatAreStdoutAreWrittenThere) {
  make("log", "old\n");
  const Words line = generate_on_tiny({"-q", "-p", "Alice", "-n", "4", "--temp", "0"});
  EXPECT_EQ(run_in(folder_.path(), words(line, {"-o", "/dev/stdout"}), ">>log").code, 0);
  EXPECT_EQ(read_file(folder_ / "log"), "old\n" + run(line).out);
  const Words endless = generate_on_tiny({"-q", "-p", "Alice", "-n", "-1", "--temp", "0", "-o", "/dev/stdout"});
  const Outcome outcome = run({"/bin/bash", "-c", joined(endless) + "| head -c 10 >/dev/null; exit ${PIPESTATUS[0]}"});
  EXPECT_EQ(outcome.code, 141);
  EXPECT_EQ(outcome.err, "");
}

TEST(Stdout, ThatTakesNothingIsExitFiveInEveryProgram) {
  for (const Words& line :
       {Words{kGenerate, "-h"}, Words{kPpl, "--help-all"}, Words{kPpl, "merge", "-h"}, Words{kBench, "-h"},
        Words{kBench, "--version"}, Words{MMREC_KERNEL_BENCH, "-h"},
        Words{MMREC_KERNEL_BENCH, "--quick", "--only", "nothing"}, generate_on_tiny({"-p", "x", "-n", "5"}),
        generate_on_tiny({"-p", "x", "--json", "-n", "5"}), ppl_on_tiny({"--ids", kIds})}) {
    for (const auto& [redirection, says] :
         {std::pair{">/dev/full", "stdout: cannot write (No space left on device)"}, {">&-", "stdout: cannot write"}}) {
      expect_refused(run_in("/", line, redirection), 5, {says}, joined(line) + redirection);
    }
  }
  for (const char* format : {"text", "json", "jsonl"}) {
    expect_refused(ppl({"--ids", "--format", format, "-o", "/dev/full", kIds}), 5, {"/dev/full: cannot write"}, format);
  }
}

}  // namespace
}  // namespace mmrec::test
