// Runs of mmrec-ppl that are divided: shards and their merging, runs that go on; and what is made of documents besides.
#include "tests/apps/programs.h"

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
  expect_refused(merge({}), 2, {"nothing to merge"});
  const std::string other = folder_ / "other.jsonl";
  EXPECT_EQ(ppl({"--mode", "rolling", "--window", "3", "--shard", "2/2", "--format", "jsonl", "-o", other}).code, 0);
  expect_refused(merge({files[0], other}), 3, {other + ":1: a record of another run", "rolling"});
  std::string line = read_file(files[0]);
  write_file(other, line.replace(line.find("\"nll\":"), 6, "\"nil\":"));
  expect_refused(merge({other}), 3, {other + ":1: not the record of a document", "(found no 'nll'"});
  for (const char* shard : {"0/2", "3/2", "1", "1/", "a/2", "-1/2", "1/2/3"}) {
    expect_refused(ppl({"--shard", shard}), 2, {"--shard", "1 <= I <= N"}, shard);
  }
}

TEST_F(Parts, MergingProvesThatNoDocumentIsMissing) {
  const Words files = shards(3);
  EXPECT_EQ(merge(files).code, 0);
  for (std::size_t i = 0; i < files.size(); ++i) {
    Words others = files;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    expect_refused(merge(others), 3, {"is missing"}, files[i]);
    const std::string whole = read_file(files[i]);
    write_file(files[i], whole.substr(0, whole.rfind('\n', whole.size() - 2) + 1));
    expect_refused(merge(files), 3, {"is missing"}, files[i]);
    write_file(files[i], whole);
  }
  EXPECT_EQ(ppl({"--format", "jsonl", "-o", files[0]}).code, 0);
  const std::string whole = read_file(files[0]);
  write_file(files[0], whole + R"({"doc":31)" + whole.substr(whole.find(",\"name\"")));
  expect_refused(merge({files[0]}), 3, {"document 1 is there twice"});
  write_file(files[0], "");
  expect_refused(merge({files[0]}), 3, {"found 0 documents"});
}

TEST_F(Parts, MergingRefusesARecordThatNoRunWrites) {
  const std::string part = folder_ / "part.jsonl";
  write_file(file_, "{\"text\":\"one two\"}\n");
  EXPECT_EQ(ppl({"--format", "jsonl", "-o", part}).code, 0);
  const Json record = Json::parse(read_file(part));
  std::vector<std::pair<std::string, Json>> changes = {
      {"mode", "\x1b[2J"}, {"device", "\x1b]0;title\x07"}, {"device", std::string(201, 'x')}, {"\x1b[2J", 1}};
  for (const Json& change : Json::parse(R"([["mode", 5], ["mode", "full\nppl 1.0"], ["mode", "strided"], ["window", 4],
      ["bos", "some"], ["calls", "prompt"], ["prefill_mode", null], ["sweep_tol", 0], ["max_sweeps", -1],
      ["precision", "fp8"], ["version", "1\n2"], ["model", "0123"], ["tokenizer", 1], ["hash", null], ["name", 1],
      ["doc", -1], ["tokens", 9223372036854775807], ["tokens", 9007199254740993], ["tokens", 1.0], ["nll", "1"],
      ["nll", 1e300], ["nll_m2", -1], ["nll_m2", 1e300], ["ppl", "1"], ["bytes", -1], ["words", 1.5],
      ["last", false], ["docs", 7], ["schema", "mine"]])")) {
    changes.emplace_back(change[0], change[1]);
  }
  for (const auto& [key, value] : changes) {
    Json changed = record;
    changed[key] = value;
    write_file(part, changed.dump() + "\n");
    const Outcome outcome = merge({part});
    expect_refused(outcome, 3, {part + ":1: field '"}, key + " " + value.dump());
    EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos) << key;
  }
  for (const char* key : {"tokens", "bytes", "words"}) {
    Json first = record;
    first.erase("last");
    first[key] = std::int64_t{1} << 53;
    Json second = record;
    second["doc"] = 1;
    write_file(part, first.dump() + "\n" + second.dump() + "\n");
    expect_refused(merge({part}), 3, {part + ":2: tokens, bytes or words add up to too many"}, key);
  }
  Json far = record;
  far["nll"] = 1e30;
  write_file(part, far.dump() + "\n");
  expect_refused(merge({part}), 6, {"not finite"});
}

TEST_F(Parts, ARunGoesOnWhereItEnded) {
  const std::string out = folder_ / "out.jsonl";
  const Words options = {"--format", "jsonl", "--resume", "-o", out};
  const Outcome first = ppl(options);
  EXPECT_EQ(first.code, 0) << first.err;
  const std::string whole = read_file(out);
  const Json summary = json_of(ppl({"--format", "json"}));
  const std::size_t line = whole.find('\n');  // cut around the end of a line, too
  for (const std::size_t kept : {std::size_t{0}, std::size_t{1}, line - 2, line - 1, line, line + 1, whole.size() / 3,
                                 whole.size() - 3, whole.size() - 1, whole.size()}) {
    write_file(out, whole.substr(0, kept));
    const Outcome again = ppl(options);
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_EQ(read_file(out), whole) << kept;
    expect_says(again.err, {summary["tokens"].dump() + " tokens"});
  }
  expect_refused(ppl(words(options, {"--mode", "rolling", "--window", "9"})), 3,
                 {out + ":1: a record of another run: mode"});
  write_file(folder_ / "short.jsonl", corpus().substr(0, 60));
  EXPECT_EQ(run(ppl_on_tiny(words({"-f", folder_ / "short.jsonl"}, options))).code, 3) << "other documents";
  EXPECT_EQ(read_file(out), whole) << "and nothing is lost";
}

TEST_F(Parts, ARunGoesOnWithACorpusThatHasGrown) {
  const std::string out = folder_ / "out.jsonl";
  const Words options = {"--format", "jsonl", "-o", out};
  EXPECT_EQ(ppl(options).code, 0);
  write_file(file_, corpus() + "{\"text\":\"and more\"}\n");
  EXPECT_EQ(ppl(words(options, {"--resume"})).code, 0);
  const std::string grown = read_file(out);
  EXPECT_EQ(ppl(options).code, 0);
  EXPECT_EQ(grown, read_file(out));
}

TEST_F(Parts, ARunGoesOnWithADocumentWhoseNameIsNoUtf8) {
  const std::string odd = folder_ / "\xff.txt";
  write_file(odd, "one two");
  const Words options = ppl_on_tiny({odd, "--format", "jsonl", "--resume", "-o", folder_ / "out.jsonl"});
  EXPECT_EQ(run(options).code, 0);
  EXPECT_EQ(run(options).code, 0);
}

TEST_F(Parts, ARunGoesOnOnlyWithItsOwnOptionsAndDocuments) {
  const std::string out = folder_ / "out.jsonl";
  const std::string text = "{\"text\":\"one two\",\"more\":\"three\"}\n";
  write_file(file_, text + text);
  const Words options = {"--format", "jsonl", "--resume", "-o", out};
  EXPECT_EQ(ppl(options).code, 0);
  const std::string whole = read_file(out);
  const auto expect_kept = [&](const Words& more, std::string_view says) {
    expect_refused(ppl(words(options, more)), 3, {out, says}, joined(more));
    EXPECT_EQ(read_file(out), whole) << joined(more);
  };
  expect_kept({"--sweep-tol", "0.5"}, "another run: sweep_tol (found \"auto\", expected 0.5)");
  expect_kept({"--prefill", "steps"}, "another run: prefill_mode");
  expect_kept({"--precision", "bf16"}, "another run: precision");
  expect_kept({"--field", "more"}, ":1: --resume: a record of another document");
  write_file(file_, text + "{\"text\":\"one too\"}\n");
  expect_kept({}, ":2: --resume: a record of another document");
  std::string older = whole;
  older.erase(older.find("\"hash\""), sizeof("\"hash\":\"0123456789abcdef\",") - 1);
  write_file(out, older);
  expect_refused(ppl(options), 3, {out + ":1: ", "older mmrec-ppl (found no 'hash'"});
  EXPECT_EQ(read_file(out), older);
}

TEST_F(Parts, GoingOnLeavesFilesOfOthersAsTheyAre) {
  const std::string out = folder_ / "notes.txt";
  const Words options = {"--format", "jsonl", "--resume", "-o", out};
  EXPECT_EQ(ppl(options).code, 0);
  const std::string whole = read_file(out);
  const std::string line = whole.substr(0, whole.find('\n'));
  const auto expect_kept = [&](const std::string& held, const Words& command) {
    write_file(out, held);
    const Outcome outcome = run(command);
    EXPECT_NE(outcome.code, 0) << held << joined(command);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(read_file(out), held) << joined(command);
  };
  const Words own = ppl_on_tiny(words({file_}, options));
  for (const std::string& foreign :
       {std::string("hello"), std::string("hello\n"), std::string("{}"), std::string("{\"doc\":1,"),
        "x" + line.substr(0, 40), line + "\nhello", whole + "h", whole + line, line + "}\n"}) {
    expect_kept(foreign, own);
  }
  // What a killed run has left may go, but not before the next one has proved possible.
  const std::string cut = line.substr(0, line.size() / 2);
  write_file(folder_ / "bad.jsonl", "oops\n");
  expect_kept(cut, ppl_on_tiny(words({folder_ / "none.jsonl"}, options)));
  expect_kept(cut, ppl_on_tiny(words({folder_ / "bad.jsonl"}, options)));
  expect_kept(cut, with_device({kPpl, "-m", folder_ / "none"}, words({file_}, options)));
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
  std::string changed;
  int number = 0;
  for (const std::string& line : lines_of(read_file(saved))) {
    Json json = Json::parse(line);
    json["logprob"] = json["logprob"].get<double>() + (number == 4 ? 0.5 : number == 9 ? -0.25 : 0.0);
    changed += json.dump() + "\n";
    ++number;
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
    expect_says(outcome.err, {"mmrec-ppl: " + saved + says});
  };
  write_file(saved, changed.substr(0, changed.rfind('\n', changed.size() - 2) + 1));
  expect_rejected(":" + std::to_string(number - 1) + ": too few tokens (found the end, expected document 30");
  write_file(saved, std::string(changed).replace(changed.find("\"logprob\":"), 11, "\"logprob\":-1e39,\"x\":"));
  expect_rejected(":1: field 'logprob' (found -1e+39");
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
  expect_says(text, {"a &lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; &amp; b"});
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
  expect_refused(run({kPpl, kTiny}), 2, {"no documents"});
}

TEST_F(Parts, QuietSaysNothing) { EXPECT_EQ(run(ppl_on_tiny({"-q", "-"}), "one two").err, ""); }

}  // namespace
}  // namespace mmrec::test
