// What the programs say where something is not as they need it, and where lines on stderr stand.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

TEST(Messages, AFileInAFoldersPlaceIsAnsweredWithWhatToDo) {
  const TempFolder folder;
  const std::vector<std::pair<std::string, std::string>> files = {
      {"checkpoint.pt", "weights/convert.py " + std::string(folder / "checkpoint.pt") + " -o FOLDER"},
      {"state.msgpack", "weights/convert.py"},
      {"model.gguf", "a GGUF file, which is not read"},
      {"model.safetensors", "Try: -m " + folder.path().string()}};
  for (const auto& [name, says] : files) {
    write_file(folder / name, "x");
    const std::string path = folder / name;
    expect_refused(run({kGenerate, "--device", "cpu", "-m", path, "-p", "x"}), 3,
                   {path, "expected a model folder", says});
    expect_refused(run({kGenerate, "--device", "cpu", path, "-p", "x"}), 3, {says});
    expect_refused(run({kPpl, "--device", "cpu", "-m", path, "-"}), 3, {says});
  }
}

TEST(Messages, AMissingTokenizerIsNamedWithWaysOut) {
  const TempFolder folder;
  copy_files(kTiny, folder.path(), {"config.json", "model.safetensors"});
  for (const Words& line : {Words{kGenerate, "-p", "x"}, Words{kPpl, "-"}}) {
    expect_refused(run(words(line, {"--device", "cpu", "-m", folder.path()})), 3,
                   {"tokenizer.model: the tokenizer is missing", "convert.py --tokenizer", "--ids"});
  }
}

TEST(Messages, TheTimingsBeginALineWhereTheyFollowTheText) {
  const TempFolder folder;
  const std::string line = joined(generate_on_tiny({"-p", "Alice", "-n", "5", "--temp", "0"}));
  const std::string text = generate({"-p", "Alice", "-n", "5", "--temp", "0"}).out;
  ASSERT_NE(text.back(), '\n');
  EXPECT_EQ(run({"/bin/sh", "-c", line + "> " + std::string(folder / "both") + " 2>&1"}).code, 0);
  const std::string both = read_file(folder / "both");
  EXPECT_EQ(both.rfind(text + "\nmmrec-generate: load ", 0), 0U) << both;
  EXPECT_EQ(run({"/bin/sh", "-c", line + "2>&1 | cat"}).out.rfind(text + "\nmmrec-generate: load ", 0), 0U);
  EXPECT_EQ(run({"/bin/sh", "-c", line + "-q > " + std::string(folder / "text") + " 2>&1"}).code, 0);
  EXPECT_EQ(read_file(folder / "text"), text) << "nothing follows, so nothing is added";
}

TEST(Messages, ATerminalThatIsReadIsSaidToBe) {
  for (const Words& line : {generate_on_tiny({"-f", "-", "-n", "2"}), ppl_on_tiny({"-"}), ppl_on_tiny({"--ids", "-"}),
                            generate_on_tiny({"--lines", "-f", "-", "-n", "2"})}) {
    Process process(on_terminal(line));
    ASSERT_TRUE(process.read_stderr("reading from the terminal (Ctrl-D ends the input)")) << joined(line);
    process.type("[1,2,3]\n\x04");
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err.find("reading", outcome.err.find("reading") + 1), std::string::npos) << "once";
  }
}

TEST(Messages, NothingToScoreIsNoFaultHoweverTheCorpusIsSplit) {
  for (const Words& how :
       {Words{}, Words{"--split-by", "line"}, Words{"--split-by", "blank"}, Words{"--split-by", "jsonl"},
        Words{"--ids"}, Words{"--mode", "rolling", "--window", "8"}, Words{"--mode", "strided", "--window", "8"},
        Words{"--mode", "llama", "--window", "8"}, Words{"--per-doc"}}) {
    const Outcome outcome = ppl(words(how, {"--format", "json", "-"}), "");
    const Json json = json_of(outcome);
    for (const char* key : {"ppl", "ppl_stderr", "bits_per_byte", "word_ppl", "byte_ppl"}) {
      EXPECT_TRUE(json[key].is_null()) << joined(how) << key;
    }
    EXPECT_EQ(json["tokens"], 0);
    expect_says(outcome.err, {"0 scored tokens: there is no perplexity"});
    EXPECT_EQ(outcome.err.find("nan"), std::string::npos) << outcome.err;
  }
  for (const Words& how : {Words{}, Words{"--per-doc"}}) EXPECT_EQ(ppl(words(how, {"-"}), "").code, 0);
  EXPECT_EQ(ppl_json({"--per-token", "--ids", "-"}, "")["documents"], Json::array());
  EXPECT_TRUE(ppl_json({"--ids", "-"}, "[]\n[5]\n")["ppl"].is_null());
  for (const Words& how : {Words{"--split-by", "line"}, Words{"--split-by", "blank"}, Words{"--split-by", "jsonl"},
                           Words{"--ids"}, Words{"--pairs"}}) {
    EXPECT_EQ(ppl(words(how, {"-"}), "\n \n\t\r\n").code, 0) << joined(how);
  }
  EXPECT_EQ(generate({"--jsonl", "-"}, "\n \n").code, 0);
  EXPECT_EQ(generate({"--lines"}, "").code, 0);
}

}  // namespace
}  // namespace mmrec::test
