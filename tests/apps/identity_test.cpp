// A law over command lines: two runs that differ in an option that decides bits share nothing that is kept between runs
// (an entry of the prefix cache, what a state file was computed with, records of --resume). Two runs that differ only
// in other options share all of it. Every option must be in a table below.
#include "apps/generate/options.h"
#include "apps/ppl/options.h"
#include "mmrec/state_file.h"
#include "tests/apps/programs.h"
#include "tests/support/tokenizer_builder.h"

namespace mmrec::test {
namespace {

enum class Decides {
  kBits,     // the bits of a state, or figures, of given tokens
  kTokens,   // which tokens: the prompt or the documents
  kNothing,  // of what is kept
  kForm,     // another form of run, without what is compared here
};

enum Architectures : unsigned { kMmrec = 1, kMmrec100m = 2, kJax = 4, kAll = 7 };

struct Classified {
  std::string_view option;
  Decides decides;
  std::vector<std::string> values = {};  // words of a command line; none: not tried
  unsigned architectures = kAll;
};

using enum Decides;

/// `options`, and those that both programs have.
std::vector<Classified> with_common(std::vector<Classified> options) {
  options.insert(options.begin(), {{"model", kBits, {"-m MODEL", "-m OTHER"}},
                                   {"file", kTokens},
                                   {"output", kForm},
                                   {"device", kBits},
                                   {"precision", kBits, {"--precision fp32", "--precision bf16"}},
                                   {"threads", kNothing, {"--threads 1", "--threads 2"}},
                                   {"quiet", kNothing, {"--quiet"}},
                                   {"verbose", kNothing},
                                   {"sandbox", kNothing},
                                   {"expert", kBits, {"--expert both", "--expert text", "--expert code"}, kMmrec100m},
                                   {"prefill", kBits, {"--prefill auto", "--prefill sweeps", "--prefill steps"}},
                                   {"sweep-tol", kBits, {"--sweep-tol 0.5", "--sweep-tol 0.001"}},
                                   {"help", kForm},
                                   {"help-all", kForm},
                                   {"version", kForm}});
  return options;
}

/// `options`, and those of the sampler, which decide nothing of what is kept.
std::vector<Classified> with_sampling(std::vector<Classified> options) {
  for (const SamplerOption& option : kSamplerOptions) {
    const std::string flag = "--" + std::string(option.flag);
    const bool is_real = std::holds_alternative<float SamplerOptions::*>(option.member);
    if (option.in_programs())
      options.push_back({option.flag, kNothing, {flag + " 1", flag + (is_real ? " 0.5" : " 2")}});
  }
  return options;
}

const std::vector<Classified> kOfGenerate = with_common(with_sampling({
    {"prompt", kTokens},
    {"escape", kTokens},
    {"tokens", kNothing, {"-n 1", "-n 3", "-n 8"}},
    {"stop", kNothing, {"--stop x"}},
    {"num-samples", kForm},
    {"logprobs", kNothing, {"--logprobs 2"}},
    {"echo", kNothing, {"--echo"}},
    {"json", kForm},
    {"lines", kForm},
    {"jsonl", kForm},
    {"as-completed", kForm},
    {"slots", kForm},
    {"max-line-mb", kForm},
    {"max-line-tokens", kForm},
    {"max-line-extra-kb", kForm},
    {"interactive", kForm},
    {"state-out", kForm},
    {"state-in", kForm},
    {"prefix-cache", kForm},
    {"prefix-cache-mb", kNothing, {"--prefix-cache-mb 7"}},
    {"batch-invariant", kNothing, {"--batch-invariant"}},  // on the CPU; on a GPU it decides bits
    {"calls", kBits},                                      // a prompt that is one call has no prefix cache
    {"bank", kBits, {"--calls stepwise --bank true", "--calls stepwise --bank false"}, kJax},
}));

const std::vector<Classified> kOfPpl = with_common({
    {"ids", kTokens},
    {"split-by", kTokens},
    {"field", kTokens},
    {"pairs", kForm},
    {"mode", kBits, {"--mode full", "--mode rolling --window 3"}},
    {"window", kBits},
    {"stride", kBits},
    {"format", kForm},
    {"per-token", kForm},
    {"per-doc", kNothing, {"--per-doc"}},
    {"compare", kForm},
    {"save-logprobs", kForm},
    {"plot", kForm},
    {"html", kForm},
    {"resume", kForm},
    {"shard", kTokens},
    {"max-text-mb", kNothing, {"--max-text-mb 3"}},
    {"batch", kNothing, {"--batch 1", "--batch 2"}},
    {"calls", kBits, {"--calls stepwise", "--calls whole --leaky", "--bank false"}, kJax},
    {"leaky", kForm},
    {"bank", kBits},  // see --calls, which need one
});

void expect_same_options(std::span<const apps::Option> table, const std::vector<Classified>& classified) {
  std::set<std::string_view> there, known;
  for (const apps::Option& option : table) there.insert(option.name);
  for (const Classified& option : classified) known.insert(option.option);
  for (const std::string_view name : there) {
    EXPECT_TRUE(known.contains(name)) << "--" << name << " is new: say in this test what it decides";
  }
  for (const std::string_view name : known) EXPECT_TRUE(there.contains(name)) << "there is no --" << name;
}

/// A model and another, of which one bit of the weights is flipped.
struct Folders {
  TempFolder folder;
  explicit Folders(const std::string& from) {
    for (const char* name : {"one", "other"}) {
      const std::filesystem::path to = folder / name;
      std::filesystem::create_directory(to);
      copy_files(from, to, {"config.json", "model.safetensors"});
      TokenizerBuilder tokenizer;
      tokenizer.words({"\u2581once", "\u2581upon", "\u2581a", "\u2581time"});
      write_file(to / "tokenizer.model", tokenizer.build());
    }
    const std::filesystem::path weights = folder / "other/model.safetensors";
    EditableCheckpoint checkpoint(weights);
    for (EditableTensor& tensor : checkpoint.tensors) {
      if (tensor.name.find("embed") != std::string::npos) tensor.bytes[0] ^= 0x01;  // a tensor of every variant
    }
    checkpoint.write(weights);
  }
};

/// Two command lines that differ in one option.
struct Pair {
  const Classified* option = nullptr;
  Words one, other;
};

class Law : public testing::Test {
 protected:
  Law() : folders_{{kMmrec, kUpstream + "/mdi"}, {kMmrec100m, kUpstream + "/mmrec100m"}, {kJax, kUpstream + "/jax"}} {}

  Pair random_pair(const std::vector<Classified>& options, unsigned round) {
    const auto& [architecture, from] = folders_[round % folders_.size()];
    auto& folders = made_[architecture];
    if (!folders) folders = std::make_unique<Folders>(from);
    std::vector<const Classified*> tried;
    for (const Classified& option : options) {
      const bool changes = option.values.size() > (option.decides == kBits ? 1U : 0U);
      if (changes && (option.architectures & architecture) != 0) tried.push_back(&option);
    }
    Pair pair{tried[round % tried.size()], {}, {}};
    for (const Classified* option : tried) {
      std::vector<std::string> values = option->values;
      // Without sweeps their tolerance decides nothing.
      if (option->option == "prefill" && pair.option->option == "sweep-tol") values.pop_back();
      if (option->decides == kNothing) values.emplace_back();
      const std::size_t value = random_() % values.size();
      const std::size_t step = option == pair.option ? 1 + random_() % (values.size() - 1) : 0;  // to another value
      add(pair.one, values[value], *folders);
      add(pair.other, values[(value + step) % values.size()], *folders);
    }
    return pair;
  }

  std::mt19937 random_{5};
  TempFolder scratch_;

 private:
  static void add(Words& to, const std::string& value, const Folders& folders) {
    for (const std::string& word : split(value)) {
      const std::filesystem::path path = word == "MODEL" ? folders.folder / "one" : folders.folder / "other";
      to.push_back(word == "MODEL" || word == "OTHER" ? path.string() : word);
    }
  }

  std::vector<std::pair<unsigned, std::string>> folders_;
  std::map<unsigned, std::unique_ptr<Folders>> made_;
};

TEST(Identity, EveryOptionIsClassified) {
  expect_same_options(apps::generate_program().options, kOfGenerate);
  expect_same_options(apps::ppl_program().options, kOfPpl);
}

/// The model's fingerprint and what the state was computed with.
std::string identity_of(const std::string& state_file) {
  const SavedSequence saved = read_state_file(state_file);
  return std::string(reinterpret_cast<const char*>(saved.state.data()) + 24, 8) + saved.computed_with;
}

TEST_F(Law, RunsOfGenerateShareStatesIfAndOnlyIfTheyComputeAlike) {
  for (unsigned round = 0; round < 36; ++round) {
    const Pair pair = random_pair(kOfGenerate, round);
    const std::string name = std::to_string(round);
    const auto line = [&](const Words& options, const char* state) {
      const Words fixed = {kGenerate, "--device", "cpu", "--json", "-p", "once upon a time"};
      const Words places = {"--prefix-cache", scratch_ / ("cache" + name), state, scratch_ / (name + state)};
      return words(words(fixed, places), options);
    };
    const bool alike = pair.option->decides == kNothing;
    const std::string what = joined(pair.one) + "\n" + joined(pair.other);
    const Json one = json_of(run(line(pair.one, "--state-out")));
    const std::string identity = identity_of(scratch_ / (name + "--state-out"));
    const Json other = json_of(run(line(pair.other, "--state-out")));
    EXPECT_EQ(other["timings"]["cached_tokens"], alike ? one["prompt_tokens"].size() : 0) << what;
    EXPECT_EQ(identity_of(scratch_ / (name + "--state-out")) == identity, alike) << what;
  }
}

TEST_F(Law, RunsOfPplGoOnFromRecordsIfAndOnlyIfTheyComputeAlike) {
  write_file(scratch_ / "ids", "[1, 5, 3, 7, 2]\n[1, 4, 6]\n");
  for (unsigned round = 0; round < 36; ++round) {
    const Pair pair = random_pair(kOfPpl, round);
    const std::string out = scratch_ / (std::to_string(round) + ".jsonl");
    const auto line = [&](const Words& options) {
      const Words fixed = {kPpl, "--device", "cpu", "--ids", "--format", "jsonl", "--resume", "-o", out};
      return words(words(fixed, options), {scratch_ / "ids"});
    };
    const std::string what = joined(pair.one) + "\n" + joined(pair.other);
    const Outcome one = run(line(pair.one));
    ASSERT_EQ(one.code, 0) << what << "\n" << one.err;
    const std::string records = read_file(out);
    const Outcome other = run(line(pair.other));
    EXPECT_EQ(other.code, pair.option->decides == kNothing ? 0 : 3) << what << "\n" << other.err;
    EXPECT_EQ(read_file(out), records) << what;
  }
}

}  // namespace
}  // namespace mmrec::test
