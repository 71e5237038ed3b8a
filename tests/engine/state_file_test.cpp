// State files: a sequence goes on from one as if it had never stopped, no damage passes, and what was there before
// stays until the new file is whole.
#include "mmrec/state_file.h"

#include "mmrec/generate.h"
#include "mmrec/model.h"
#include "tests/engine/sessions.h"
#include "tests/support/model_folder.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

class StateFile : public testing::Test {
 protected:
  Session after(const std::string& prompt) const { return begun(model_, tokenizer_.encode(prompt)); }
  /// Generates, and consumes the last token too.
  std::vector<int> go_on(Session& session, const SamplerOptions& sampler, std::int64_t tokens) const {
    const GenerateResult result = generate(session, tokenizer_, {.sampler = sampler, .max_tokens = tokens});
    session.step(std::vector<int>{result.tokens.back()});
    return result.tokens;
  }

  TempFolder folder_;
  Model model_ = on_cpu(folder_of("tiny"));
  Tokenizer tokenizer_ = Tokenizer::load(folder_of("tiny"));
};

/// Of state files: the last that brought options of the sampler.
constexpr std::uint32_t kVersion = std::ranges::max(kSamplerOptions, {}, &SamplerOption::since).since;

SamplerOptions warm() { return {.temperature = 1.3F, .top_k = 0, .repetition_penalty = 1.4F, .seed = 77}; }

TEST_F(StateFile, AContinuedTextIsTheUninterruptedOne) {
  Session whole = after("Alice was");
  std::vector<int> expected = go_on(whole, warm(), 40);
  for (const std::int64_t first : {1, 7, 39}) {
    Session begun = after("Alice was");
    std::vector<int> tokens = go_on(begun, warm(), first);
    write_state_file(folder_ / "state", save_sequence(begun, warm(), &tokenizer_));

    const SavedSequence saved = read_state_file(folder_ / "state");
    EXPECT_EQ(saved.sampler, warm());
    Session resumed = model_.new_session();
    restore_sequence(resumed, saved, &tokenizer_);
    EXPECT_EQ(resumed.position(), begun.position());
    const std::vector<int> rest = go_on(resumed, saved.sampler, 40 - first);
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    EXPECT_EQ(tokens, expected) << first;
    EXPECT_EQ(resumed.save(), whole.save()) << first;
    EXPECT_TRUE(std::equal(resumed.recent_tokens().begin(), resumed.recent_tokens().end(),
                           whole.recent_tokens().begin(), whole.recent_tokens().end()));
  }
}

TEST_F(StateFile, ItsOwnerAloneCanReadIt) {
  const SavedSequence saved = save_sequence(after("x"), {}, &tokenizer_);
  write_file(folder_ / "state", "");
  std::filesystem::permissions(folder_ / "state", std::filesystem::perms::all);
  write_state_file(folder_ / "state", saved);
  EXPECT_EQ(std::filesystem::status(folder_ / "state").permissions(), std::filesystem::perms(0600));
}

// Of the whole file, through the system: a line that names it, and the session as it was. Within the state that it
// holds every bit again, with the file's own checksum made good, so that it is the session that must refuse.
TEST_F(StateFile, NoDamageOfTheFileReachesASession) {
  const std::filesystem::path path = folder_ / "state";
  const SavedSequence saved = save_sequence(after("Alice"), warm(), &tokenizer_);
  const std::vector<std::byte> bytes = encode_sequence(saved);
  Session session = after("was");
  const std::vector<std::byte> before = session.save();
  write_file(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  const auto is_refused = [&] {
    const std::string reason = file_refusal([&] { restore_sequence(session, read_state_file(path), &tokenizer_); });
    return reason.starts_with(path.string()) && reason.find('\n') == std::string::npos && session.save() == before;
  };
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto write_byte = [&](std::size_t at, std::byte value) {
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(value)).flush();
  };
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    write_byte(bit / 8, bytes[bit / 8] ^ (std::byte{1} << (bit % 8)));
    ASSERT_TRUE(is_refused()) << "bit " << bit;
    write_byte(bit / 8, bytes[bit / 8]);
  }
  ASSERT_TRUE(file.good());
  EXPECT_EQ(encode_sequence(read_state_file(path)), bytes);
  std::filesystem::resize_file(path, bytes.size() + 1);
  ASSERT_TRUE(is_refused()) << "a byte more";
  for (std::size_t size = bytes.size(); size-- > 0;) {
    std::filesystem::resize_file(path, size);
    ASSERT_TRUE(is_refused()) << "cut to " << size;
  }
  SavedSequence inner = saved;
  for (std::size_t bit = 0; bit < 8 * inner.state.size(); ++bit) {
    inner.state[bit / 8] ^= std::byte{1} << (bit % 8);
    const SavedSequence sealed_again = decode_sequence(encode_sequence(inner));
    const std::string reason = file_refusal([&] { restore_sequence(session, sealed_again, &tokenizer_); });
    ASSERT_TRUE(reason.starts_with("saved state: ") && session.save() == before) << "bit " << bit << ": " << reason;
    inner.state[bit / 8] = saved.state[bit / 8];
  }
  restore_sequence(session, saved, &tokenizer_);
  EXPECT_EQ(session.save(), saved.state);
}

TEST_F(StateFile, WhatDoesNotBelongIsNamed) {
  SavedSequence saved = save_sequence(after("Alice"), {}, &tokenizer_);
  Session session = begun(model_, std::vector<int>{5});
  const std::vector<std::byte> before = session.save();
  ++saved.tokenizer_fingerprint;
  expect_says(file_refusal([&] { restore_sequence(session, saved, &tokenizer_); }), {"another tokenizer"});
  EXPECT_EQ(file_refusal([&] { restore_sequence(session, saved); }), "no error");
  session.restore(before);
  const Model other = on_cpu(folder_of("mmrec-12m"));
  Session of_other = other.new_session();
  expect_says(file_refusal([&] { restore_sequence(of_other, saved); }), {"another model"});
  saved.recent = {0, 100'000'000};
  expect_says(file_refusal([&] { restore_sequence(session, saved); }), {"id 100000000"});
  EXPECT_EQ(session.save(), before);

  write_file(folder_ / "text", std::string(300, 'x'));
  expect_says(file_refusal([&] { read_state_file(folder_ / "text"); }), {"not a state file"});
  write_file(folder_ / "short", "mmrecSQ\n");
  expect_says(file_refusal([&] { read_state_file(folder_ / "short"); }), {"found 8 bytes"});
  expect_says(file_refusal([&] { read_state_file(folder_.path()); }), {"a folder"});
  std::vector<std::byte> earlier = encode_sequence(saved);
  earlier[12] = std::byte{1};
  EXPECT_EQ(file_refusal([&] { decode_sequence(earlier); }),
            "state file: of an earlier version of mmrec: found format 1, expected " + std::to_string(kVersion) +
                ". Make it again with this version");
  expect_says(file_refusal([&] { read_state_file(folder_ / "none"); }), {"none"});
}

TEST_F(StateFile, IsOfOneSequence) {
  Session two = model_.new_session(2);
  EXPECT_EQ(refusal([&] { save_sequence(two); }), "save_sequence: found a batch of 2, expected 1");
  const SavedSequence saved = save_sequence(after("x"));
  EXPECT_EQ(saved.tokenizer_fingerprint, 0U);
  EXPECT_EQ(refusal([&] { restore_sequence(two, saved); }), "restore_sequence: found a batch of 2, expected 1");
  Session session = model_.new_session();
  restore_sequence(session, saved, &tokenizer_);  // it knows token ids alone: any tokenizer will do
  EXPECT_EQ(session.save(), saved.state);
}

TEST_F(StateFile, TheSamplersOptionsLieWhereTheDocumentSays) {
  const SamplerOptions sampler = {.temperature = 1.5F,
                                  .top_k = 7,
                                  .top_p = 0.5F,
                                  .min_p = 0.25F,
                                  .repetition_penalty = 1.25F,
                                  .repetition_window = 33,
                                  .vocab_limit = 44,
                                  .seed = 0x1122334455667788};
  const std::vector<std::byte> bytes = encode_sequence(save_sequence(after("Alice"), sampler));
  std::uint32_t version = 0;
  std::uint64_t seed = 0;
  std::array<float, 4> reals{};
  std::array<std::int32_t, 3> integers{};
  std::memcpy(&version, bytes.data() + 12, 4);
  std::memcpy(&seed, bytes.data() + 32, 8);
  std::memcpy(reals.data(), bytes.data() + 40, 16);
  std::memcpy(integers.data(), bytes.data() + 56, 12);
  EXPECT_EQ(version, kVersion);
  EXPECT_EQ(seed, sampler.seed);
  EXPECT_EQ(reals, (std::array{1.5F, 0.5F, 0.25F, 1.25F}));
  EXPECT_EQ(integers, (std::array{7, 33, 44}));
}

TEST_F(StateFile, NoMemoryIsTakenForAFileOfAnySize) {
  write_file(folder_ / "huge", "mmrecSQ\n");
  std::filesystem::resize_file(folder_ / "huge", (std::uintmax_t{1} << 41) + 1);  // no disk either: it has holes
  expect_says(file_refusal([&] { read_state_file(folder_ / "huge"); }), {"found 2199023255553 bytes, expected 104 to"});
}

TEST_F(StateFile, WhatCouldNotBeReadIsNotWritten) {
  const SavedSequence saved = save_sequence(after("Alice"), {}, &tokenizer_);
  const auto refused = [&](auto change) {
    SavedSequence unreadable = saved;
    change(unreadable);
    return refusal([&] { write_state_file(folder_ / "state", unreadable); });
  };
  EXPECT_EQ(refused([](SavedSequence& s) { s.recent.assign(257, 1); }),
            "saved sequence: found 257 recent tokens, expected at most 256");
  EXPECT_EQ(refused([](SavedSequence& s) { s.computed_with.assign(4097, 'x'); }),
            "saved sequence: found 4097 bytes of computed_with, expected at most 4096");
  EXPECT_EQ(refused([](SavedSequence& s) { s.sampler.top_k = -1; }),
            "sampler option top_k: found -1, expected an integer >= 0");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "state"));
}

}  // namespace
}  // namespace mmrec::test
