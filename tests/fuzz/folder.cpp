// A model folder of any files is refused, or loads and runs eight tokens on a processor, by steps and after a prompt.
//
// The input is config.json, the header of model.safetensors, model.safetensors.index.json, generation of weights and
// the tokenizer, with a zero byte between two. The header's length and the data behind it, as long as the header says,
// are made here: numbers near zero with the fourth part over the first of them. With an index the same file has two
// names.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>

#include "engine/session/access.h"
#include "mmrec/errors.h"
#include "mmrec/generate.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"
#include "models/architecture.h"
#include "tests/fuzz/harness.h"

namespace {

namespace fs = std::filesystem;
using mmrec::fuzz::require;

constexpr std::size_t kMostData = std::size_t{1} << 16;
constexpr std::size_t kMostState = std::size_t{1} << 20;  // more is right, and slow
constexpr int kDrawn = 8;

/// A folder in memory; a file is written where it differs from what the input before had.
class Folder {
 public:
  Folder() {
    const fs::path base = fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path();
    std::string name = (base / "mmrec-fuzz-XXXXXX").string();
    require(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const fs::path& path() const { return path_; }
  /// Empty: there is no such file.
  void put(const std::string& name, std::string_view bytes) {
    std::string& now = files_[name];
    if (now == bytes) return;
    now = bytes;
    if (bytes.empty()) {
      fs::remove(path_ / name);
      return;
    }
    std::ofstream out(path_ / name, std::ios::binary | std::ios::trunc);
    require(static_cast<bool>(out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()))));
  }

 private:
  fs::path path_;
  std::map<std::string, std::string> files_;
};

/// The largest number of the header that data may have as many bytes as.
std::size_t data_bytes(std::string_view header) {
  std::size_t most = 0, number = 0;
  for (const char c : header) {
    number = c >= '0' && c <= '9' ? std::min(10 * number + static_cast<std::size_t>(c - '0'), kMostData + 1) : 0;
    if (number <= kMostData) most = std::max(most, number);
  }
  return most;
}

/// High bytes 3d and bd: 0.03 to 0.12 or that negated in fp32 and bf16, about 1.3 in fp16.
std::string numbers_near_zero() {
  std::string bytes;
  std::uint64_t random = 1;
  while (bytes.size() < kMostData) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    bytes += {static_cast<char>(random >> 56U), (random >> 40U) % 2 == 0 ? '\x3d' : '\xbd'};
  }
  return bytes;
}

std::string safetensors(std::string_view header, std::string_view over) {
  static const std::string numbers = numbers_near_zero();
  std::string bytes(sizeof(std::uint64_t), '\0');
  const std::uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, sizeof length);
  bytes += header;
  const std::size_t size = data_bytes(header);
  bytes += over.substr(0, size);
  return bytes.append(numbers, 0, size - std::min(size, over.size()));
}

/// Throws what a folder is refused with.
void run(const fs::path& folder) {
  const auto loaded = mmrec::models::load_model(folder, {}, {.threads = 1});
  const mmrec::ModelInfo& info = loaded->info();
  require(info.vocab_size >= 1 && info.model_dim >= 1 && info.num_layers >= 1);
  if (loaded->state().slot_bytes > kMostState) return;
  const mmrec::Model model = mmrec::engine::Access::model(info, loaded->state(), loaded->on_cpu());
  const mmrec::Tokenizer tokenizer = mmrec::Tokenizer::load(mmrec::Tokenizer::file_of(folder));
  if (tokenizer.vocab_size() > info.vocab_size) return;  // refused by the programs
  std::vector<int> prompt = tokenizer.encode("the cat");
  if (prompt.empty()) prompt = {0};

  mmrec::Session session = model.new_session(1, {.threads = 1});
  session.prefill(prompt);
  mmrec::GenerateOptions options;
  options.max_tokens = kDrawn;
  options.eos_token_ids = info.eos_token_ids;
  const mmrec::GenerateResult result = mmrec::generate(session, tokenizer, options);
  require(result.tokens.size() <= kDrawn);
  for (const int id : result.tokens) require(id >= 0 && id < info.vocab_size);

  // The same prompt by steps, and the state on its way through bytes.
  mmrec::Session again = model.new_session(1, {.threads = 1});
  for (const int id : prompt) again.step({&id, 1});
  const std::vector<std::byte> saved = again.save();
  again.restore(saved);
  require(again.save() == saved && again.position() == std::ssize(prompt));
}

}  // namespace

MMREC_FUZZ(folder) {
  static Folder folder;
  const auto parts = mmrec::fuzz::parts_of(input, 5);
  const std::string weights = safetensors(parts[1], parts[3]);
  folder.put("config.json", parts[0]);
  folder.put("model.safetensors", parts[2].empty() ? weights : std::string());
  folder.put("model.safetensors.index.json", parts[2]);
  folder.put("a.safetensors", parts[2].empty() ? std::string() : weights);
  const bool is_ranks = parts[4].starts_with("IQ== 0");
  folder.put("tokenizer.model", is_ranks ? std::string_view() : parts[4]);
  folder.put("tokenizer.tiktoken", is_ranks ? parts[4] : std::string_view());
  try {
    run(folder.path());
  } catch (const mmrec::NumericError&) {
  } catch (const std::system_error& error) {
    require(error.code() == std::errc::no_such_file_or_directory);
  } catch (const std::bad_alloc&) {  // more weights than the machine has memory for
  } catch (const std::runtime_error& error) {
    mmrec::fuzz::require_line(error.what());
  }
}
