// Runs of mmrec-ppl that are divided: shards and their merging, runs that go on; and what is made of documents besides.
#include <csignal>
#include <sstream>

#include "tests/apps/programs.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {
namespace {

/// 31 documents of 0 to 12 words.
std::string corpus() {
  const Words all = {"Alice", "was", "beginning", "to", "get", "very", "tired", "of", "sitting", "by", "her", "sister"};
  std::string lines;
  for (std::size_t i = 0; i < 31; ++i) {
    std::string text;
    for (std::size_t w = 0; w < i * 5 % 13; ++w) text += all[(i + w) % all.size()] + " ";
    lines += Json({{"text", text}}).dump() + "\n";
  }
  return lines;
}

class Parts : public testing::Test {
 protected:
  Parts() { write_file(file_, corpus()); }

  Outcome ppl(const Words& more) const { return run(ppl_on_tiny(words({file_}, more))); }
  static Outcome merge(const Words& files) { return run(words({kPpl, "merge"}, files)); }
  Words shards(int count, const Words& more = {}) const {
    Words files;
    for (int i = 1; i <= count; ++i) {
      files.push_back(folder_ / (std::to_string(i) + ".jsonl"));
      const std::string shard = std::to_string(i) + "/" + std::to_string(count);
      EXPECT_EQ(ppl(words({"--shard", shard, "--format", "jsonl", "-o", files.back()}, more)).code, 0);
    }
    return files;
  }

  TempFolder folder_;
  std::string file_ = folder_ / "corpus.jsonl";
};

TEST_F(Parts, ShardsAddUpToTheWholeToTheLastDigit) {
  for (const Words& mode :
       {Words{}, Words{"--mode", "rolling", "--window", "3"}, Words{"--mode", "strided", "--window", "4"}}) {
    const Json whole = json_of(ppl(words({"--format", "json"}, mode)));
    for (const int count : {1, 3, 40}) {
      Words files = shards(count, mode);
      std::reverse(files.begin(), files.end());
      const Json merged = json_of(merge(words({"--format", "json"}, files)));
      EXPECT_EQ(merged["docs"], 31);
      for (const auto& [key, value] : merged.items()) EXPECT_EQ(value, whole[key]) << key << " of " << count;
    }
  }
  EXPECT_EQ(merge(shards(2)).out, ppl({}).out) << "the same as text";
}

TEST_F(Parts, MergingRefusesWhatIsNoWholeCorpus) {
  const Words files = shards(2);
  expect_refused(merge({files[0]}), 3, {"document 1 is missing"});
  expect_refused(merge({files[0], files[1], files[0]}), 3, {"document 0 is there twice"});
  expect_refused(merge({}), 2, {"nothing to merge"});
  const std::string other = folder_ / "other.jsonl";
  EXPECT_EQ(ppl({"--mode", "rolling", "--window", "3", "--shard", "2/2", "--format", "jsonl", "-o", other}).code, 0);
  expect_refused(merge({files[0], other}), 3, {other + ":1: a record of another run", "rolling"});
  std::string line = read_file(files[0]);
  write_file(other, line.replace(line.find("\"nll\":"), 6, "\"nil\":"));
  expect_refused(merge({other}), 3, {other + ":1: not the record of a document (found no 'nll'"});
  for (const char* shard : {"0/2", "3/2", "1", "1/", "a/2", "-1/2", "1/2/3"}) {
    expect_refused(ppl({"--shard", shard}), 2, {"--shard", "1 <= I <= N"}, shard);
  }
}

TEST_F(Parts, ARunGoesOnWhereItEnded) {
  const std::string out = folder_ / "out.jsonl";
  const Words options = {"--format", "jsonl", "--resume", "-o", out};
  const Outcome first = ppl(options);
  EXPECT_EQ(first.code, 0) << first.err;
  const std::string whole = read_file(out);
  const Json summary = json_of(ppl({"--format", "json"}));
  for (const std::size_t kept : {std::size_t{0}, std::size_t{1}, whole.size() / 3, whole.size() - 1, whole.size()}) {
    write_file(out, whole.substr(0, kept));
    const Outcome again = ppl(options);
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_EQ(read_file(out), whole) << kept;
    std::ostringstream ppl_text;
    ppl_text << summary["tokens"] << " tokens";
    EXPECT_NE(again.err.find(ppl_text.str()), std::string::npos) << again.err;
  }
  expect_refused(ppl(words(options, {"--mode", "rolling", "--window", "9"})), 3,
                 {out + ":1: a record of another run: mode"});
  write_file(folder_ / "short.jsonl", corpus().substr(0, 60));
  EXPECT_EQ(run(ppl_on_tiny(words({"-f", folder_ / "short.jsonl"}, options))).code, 3) << "other documents";
  EXPECT_EQ(read_file(out), whole) << "and nothing is lost";
  for (const Words& bad : {Words{"--resume"}, Words{"--resume", "-o", out, "--format", "csv"},
                           Words{"--resume", "-o", out, "--per-token"}}) {
    expect_refused(ppl(bad), 2, {"--resume: only with -o FILE"});
  }
}

TEST_F(Parts, AFaultKeepsWhatIsDoneForTheNextRun) {
  const std::string out = folder_ / "out.jsonl";
  write_file(folder_ / "bad.jsonl", corpus() + "oops\n");
  const Words options = {"-f", folder_ / "bad.jsonl", "--format", "jsonl", "--resume", "-o", out};
  EXPECT_EQ(run(ppl_on_tiny(options)).code, 3);
  const std::string kept = read_file(out);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), '\n'), 31);
}

TEST_F(Parts, ComparesWithSavedLogProbs) {
  const std::string saved = folder_ / "saved.jsonl";
  EXPECT_EQ(ppl({"--per-token", "-o", saved}).code, 0);
  const Json same = json_of(ppl({"--compare", saved, "--format", "json"}));
  EXPECT_EQ(same["diff_tokens"], same["tokens"]);
  EXPECT_EQ(same["diff_max"], 0.0);
  // One log-prob is another by 0.5, and one by -0.25.
  std::istringstream lines(read_file(saved));
  std::string changed;
  int number = 0;
  for (std::string line; std::getline(lines, line); ++number) {
    Json json = Json::parse(line);
    if (number == 4) json["logprob"] = json["logprob"].get<double>() + 0.5;
    if (number == 9) json["logprob"] = json["logprob"].get<double>() - 0.25;
    changed += json.dump() + "\n";
  }
  write_file(saved, changed);
  const Json other = json_of(ppl({"--compare", saved, "--format", "json"}));
  EXPECT_NEAR(other["diff_max"].get<double>(), 0.5, 1e-5);
  EXPECT_NEAR(other["diff_mean"].get<double>(), 0.75 / number, 1e-6);
  EXPECT_NEAR(other["diff_bias"].get<double>(), -0.25 / number, 1e-6);

  const auto expect_rejected = [&](const std::string& says) {  // after warnings of documents without tokens
    const Outcome outcome = ppl({"--compare", saved});
    EXPECT_EQ(outcome.code, 3);
    EXPECT_EQ(outcome.out, "");
    EXPECT_NE(outcome.err.find("mmrec-ppl: " + saved + says), std::string::npos) << outcome.err;
  };
  write_file(saved, changed.substr(0, changed.rfind('\n', changed.size() - 2) + 1));
  expect_rejected(":" + std::to_string(number - 1) + ": too few tokens (found the end, expected document 30");
  write_file(saved, changed + changed);
  expect_rejected(":" + std::to_string(number + 1) + ": too many tokens");
  write_file(saved, changed.replace(changed.find("\"pos\":1"), 7, "\"pos\":2"));
  expect_rejected(":1: another token (found document 1, position 2");
}

TEST_F(Parts, HtmlIsEscapedAndNeedsNothingElse) {
  write_file(file_, Json({{"text", "a <script>alert(\"1\")</script> & b"}}).dump() + "\n");
  const std::string html = folder_ / "out.html";
  const std::string plot = folder_ / "out.svg";
  EXPECT_EQ(ppl({"--html", html, "--plot", plot}).code, 0);
  const std::string page = read_file(html);
  EXPECT_EQ(page.find("<!DOCTYPE html>"), 0U);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  for (const char* outside : {"http://", "https://", "src=", "href=", "url("}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  std::string text;
  bool is_tag = false;
  for (const char c : page.substr(page.find("<h2>"), page.find("<h2>All") - page.find("<h2>"))) {
    if (c == '<') is_tag = true;
    if (!is_tag) text += c;
    if (c == '>') is_tag = false;
  }
  EXPECT_NE(text.find("a &lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; &amp; b"), std::string::npos) << text;
  const std::string drawing = read_file(plot);
  EXPECT_EQ(drawing.find("<svg "), 0U);
  EXPECT_EQ(drawing.rfind("</svg>\n"), drawing.size() - 7);
  EXPECT_EQ(ppl({"--html", folder_ / "none/out.html"}).code, 5);
  EXPECT_EQ(ppl({"--plot", folder_ / "none/out.svg"}).code, 5);
}

TEST_F(Parts, FilesAndFoldersAreTakenAsUsersGiveThem) {
  const std::string whole = ppl({}).out;
  EXPECT_EQ(run(ppl_on_tiny({"-f", file_})).out, whole);
  EXPECT_EQ(run({kPpl, "--device", "cpu", kTiny, file_}).out, whole);
  EXPECT_EQ(json_of(run(ppl_on_tiny({"-f", file_, "--file", file_, "--format", "json"})))["docs"], 62);
  expect_refused(run(ppl_on_tiny({kTiny, file_})), 2, {"--model: not with a model folder"});
  expect_refused(run({kPpl, kTiny}), 2, {"no documents"});
}

TEST_F(Parts, QuietSaysNothing) { EXPECT_EQ(run(ppl_on_tiny({"-q", "-"}), "one two").err, ""); }

}  // namespace
}  // namespace mmrec::test
