// Opening checkpoints: the files themselves, the index and its shards, and what a fault may cost. Longer than other
// files: a case for each way in which a file can be wrong.
#include "models/files/checkpoint.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>

#include "models/files/file.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using test::EditableCheckpoint;
using test::error_of;
using test::expect_says;
using test::safetensors_bytes;
using test::TempFolder;
using test::write_file;

fs::path fixture(const std::string& name) { return test::folder_of("upstream/" + name); }

std::string length_bytes(std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}

/// Why a folder with this model.safetensors is refused.
std::string refusal(std::string_view file) {
  const TempFolder folder;
  write_file(folder / "model.safetensors", file);
  std::string message = error_of([&] { Checkpoint::open(folder.path()); });
  expect_says(message, {"model.safetensors"});
  return message;
}

std::string refusal_of(const TempFolder& folder) {
  return error_of([&] { Checkpoint::open(folder.path()); });
}

/// An F32 tensor of `elements` zeros that begins at element `begin`.
std::string tensor(const std::string& name, int begin, int elements) {
  return "\"" + name + R"(":{"dtype":"F32","shape":[)" + std::to_string(elements) + R"(],"data_offsets":[)" +
         std::to_string(4 * begin) + "," + std::to_string(4 * (begin + elements)) + "]}";
}

/// The header of so many tensors without an element, whose names begin so.
std::string empty_tensors(const std::string& prefix, std::size_t count) {
  std::string header = "{";
  for (std::size_t i = 0; i < count; ++i) header += tensor(prefix + std::to_string(i), 0, 0) + ",";
  header.back() = '}';
  return header;
}

/// A folder of two shards: "a" and "b" in the first, "c" in the second.
struct Shards : TempFolder {
  Shards() {
    write_file(*this / "1.safetensors",
               safetensors_bytes("{" + tensor("a", 0, 1) + "," + tensor("b", 1, 2) + "}", std::string(12, '\0')));
    write_file(*this / "2.safetensors", safetensors_bytes("{" + tensor("c", 0, 1) + "}", "\x01\x02\x03\x04"));
    index(
        R"({"metadata":{"total_size":16},"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"}})");
  }
  void index(std::string_view text) const { write_file(*this / "model.safetensors.index.json", text); }
};

TEST(Checkpoint, OpensTheFixtures) {
  for (const char* name : {"mdi", "dpg", "hem", "segments"}) {
    const Checkpoint checkpoint = Checkpoint::open(fixture(name));
    const EditableCheckpoint expected(fixture(name) / "model.safetensors");
    EXPECT_EQ(checkpoint.tensors().size(), expected.tensors.size());
    for (const auto& tensor : expected.tensors) {
      const TensorInfo* found = checkpoint.find(tensor.name);
      ASSERT_NE(found, nullptr) << tensor.name;
      EXPECT_EQ(found->shape, tensor.shape);
      std::string bytes(tensor.bytes.size(), '\0');
      checkpoint.read(*found, 0, std::as_writable_bytes(std::span(bytes)));
      EXPECT_EQ(bytes, tensor.bytes) << tensor.name;
    }
    EXPECT_EQ(checkpoint.find("blocks.0"), nullptr);
    EXPECT_EQ(checkpoint.find(""), nullptr);
    EXPECT_EQ(checkpoint.find("zzz"), nullptr);
  }
}

TEST(Checkpoint, ReadsInsideTheTensorOnly) {
  const Shards folder;
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const TensorInfo& c = *checkpoint.find("c");
  std::byte bytes[4];
  checkpoint.read(c, 1, std::span(bytes, 3));
  EXPECT_EQ(bytes[0], std::byte{2});
  EXPECT_EQ(bytes[2], std::byte{4});
  EXPECT_THROW(checkpoint.read(c, 2, std::span(bytes, 3)), std::out_of_range);
  EXPECT_THROW(checkpoint.read(c, ~std::uint64_t{0}, std::span(bytes, 3)), std::out_of_range);
}

TEST(Checkpoint, ContentsThatAreNoCheckpoint) {
  const std::pair<std::string, std::vector<std::string_view>> contents[] = {
      {"", {"found 0 bytes"}},
      {"1234567", {"found 7 bytes"}},
      {length_bytes(0), {"does not begin with '{'"}},
      {safetensors_bytes("hello"), {"begin with '{'"}},
      {safetensors_bytes("{}", "x"), {"1 bytes of data"}},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", {"looks like a Git LFS pointer"}},
      {"<!DOCTYPE html><html>", {"looks like a web page"}},
      {"\n <html>", {"looks like a web page"}},
      {"PK\x03\x04 zip zip zip", {"looks like a PyTorch checkpoint", "convert.py"}}};
  for (const auto& [bytes, says] : contents) {
    const std::string message = refusal(bytes);
    for (const std::string_view part : says) expect_says(message, {part});
  }
}

TEST(Checkpoint, HeaderLongerThanTheFile) {
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{100'000'001}, std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    expect_says(refusal(length_bytes(length) + "{}"),
                {"header", std::to_string(length), "expected at most the file's 2"});
  }
}

TEST(Checkpoint, MissingFolderMissingFileAndAFileForAFolder) {
  const TempFolder folder;
  expect_says(error_of<std::system_error>([&] { Checkpoint::open(folder / "none"); }), {"none", "No such file"});
  expect_says(refusal_of(folder), {"no model.safetensors and no model.safetensors.index.json"});
  write_file(folder / "model.safetensors", safetensors_bytes("{}"));
  expect_says(error_of([&] { Checkpoint::open(folder / "model.safetensors"); }),
              {"found a file, expected a model folder"});
}

TEST(Checkpoint, ReadsShards) {
  const Shards folder;
  write_file(folder / "model.safetensors", "garbage");  // with an index, only its shards are read
  write_file(folder / "other.safetensors", "garbage too");
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  ASSERT_EQ(checkpoint.tensors().size(), 3U);
  EXPECT_EQ(checkpoint.path_of(*checkpoint.find("a")).filename(), "1.safetensors");
  EXPECT_EQ(checkpoint.path_of(*checkpoint.find("c")).filename(), "2.safetensors");
  EXPECT_EQ(checkpoint.path().filename(), "model.safetensors.index.json");
}

TEST(Checkpoint, IndexIsNoIndexOfItsShards) {
  const Shards folder;
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "empty"},
           {"[]", "expected a JSON object"},
           {"{}", "weight_map is missing"},
           {R"({"weight_map":{}})", "found no tensors"},
           {R"({"weight_map":[]})", "found an array, expected an object"},
           {R"({"weight_map":{"a":1}})", "found a number, expected a string"},
           {R"({"weight_map":{"a":"1.safetensors","a":"1.safetensors"}})", "duplicate key"},
           {R"({"weight_map":{"a":"1.safetensors"},"weight_map":{}})", "duplicate key"},
           {R"({"metadata":{"x":)" + std::string(100, '[') + "}}", "nested too deeply"},
           {R"({"weight_map":{"a":"1.safetensors"}} x)", "end of input"},
           {"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"},
           {"<!DOCTYPE html>", "web page"},
           {R"({"weight_map":{"a":"1.safetensors","c":"2.safetensors"}})",
            "weight_map: b of shard \"1.safetensors\" is missing"},
           {R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"2.safetensors"}})",
            "weight_map: b: found \"2.safetensors\", expected \"1.safetensors\""},
           {R"({"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors","d":"2.safetensors"}})",
            "weight_map: d is not in \"2.safetensors\""}}) {
    folder.index(text);
    expect_says(refusal_of(folder), {"model.safetensors.index.json", part});
  }
  std::string map;
  for (int i = 0; i < 1001; ++i)
    map += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) + "\":\"" + std::to_string(i) + ".safetensors\"";
  folder.index("{\"weight_map\":{" + map + "}}");
  expect_says(refusal_of(folder), {"more than 1000 shards"});
  fs::resize_file(folder / "model.safetensors.index.json", std::uintmax_t{1} << 40);
  expect_says(refusal_of(folder), {"too large"});
}

TEST(Checkpoint, ShardNamesArePlain) {
  const Shards folder;
  const TempFolder outside;
  fs::copy_file(folder / "2.safetensors", outside / "2.safetensors");
  fs::create_directory(folder / "sub");
  fs::copy_file(folder / "2.safetensors", folder.path() / "sub" / "2.safetensors");
  for (const std::string& name :
       {(outside / "2.safetensors").string(), std::string("../2.safetensors"), std::string("sub/2.safetensors"),
        std::string("./2.safetensors"), std::string(".."), std::string("."), std::string(""),
        std::string("/etc/passwd"), std::string("2.bin"), std::string("..\\\\2.safetensors"),
        std::string("2\\u0000.safetensors"), std::string(300, 'x') + ".safetensors", std::string("2.safetensors/")}) {
    folder.index(R"({"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":")" + name + R"("}})");
    expect_says(refusal_of(folder), {"weight_map: c:", "plain name"});
  }
}

TEST(Checkpoint, ShardsThatAreNone) {
  const TempFolder outside;
  struct Case {
    std::function<void(const fs::path& shard)> make;  // in place of the second shard
    std::initializer_list<std::string_view> says;
  };
  const Case cases[] = {
      {[](const fs::path&) {}, {"index.json", "names the shard \"2.safetensors\", which is missing"}},
      {[&](const fs::path& shard) {
         write_file(outside / "2.safetensors", safetensors_bytes("{" + tensor("c", 0, 1) + "}", "\x01\x02\x03\x04"));
         fs::create_symlink(outside / "2.safetensors", shard);
       },
       {"2.safetensors", "link out of the model folder"}},
      {[](const fs::path& shard) {
         write_file(shard,
                    safetensors_bytes("{" + tensor("c", 0, 1) + "," + tensor("a", 1, 1) + "}", std::string(8, '\0')));
       },
       {"a: is also in"}},
      {[](const fs::path& shard) { ASSERT_EQ(::mkfifo(shard.c_str(), 0600), 0); }, {"found a FIFO"}}};
  const Shards folder;
  for (const Case& c : cases) {
    fs::remove(folder / "2.safetensors");
    c.make(folder / "2.safetensors");
    expect_says(refusal_of(folder), c.says);
  }
  fs::remove(folder / "2.safetensors");
  fs::create_symlink("2.safetensors", folder / "2.safetensors");  // a loop
  EXPECT_THROW(Checkpoint::open(folder.path()), std::system_error);
}

TEST(Checkpoint, LinksInsideTheFolderAndToTheFolderWork) {
  const Shards folder;
  const TempFolder other;
  fs::rename(folder / "2.safetensors", folder / "real.safetensors");
  fs::create_symlink("real.safetensors", folder / "2.safetensors");
  fs::create_symlink(folder.path(), other / "link");
  EXPECT_EQ(Checkpoint::open(other / "link").tensors().size(), 3U);
}

TEST(Checkpoint, LinksToTheBlobsOfItsCacheWork) {
  const Shards shards;
  const TempFolder cache;
  const fs::path revision = cache / "snapshots/0123";
  fs::create_directories(revision);
  fs::copy(shards.path(), cache / "blobs");
  for (const auto& blob : fs::directory_iterator(cache / "blobs")) {
    fs::create_symlink("../../blobs" / blob.path().filename(), revision / blob.path().filename());
  }
  EXPECT_EQ(Checkpoint::open(revision).tensors().size(), 3U);
  const fs::path stray = cache / "snapshots/4567";  // whose link leads to a folder that is not blobs
  fs::create_directories(stray);
  fs::copy(shards.path(), cache / "other");
  for (const auto& file : fs::directory_iterator(cache / "other")) {
    fs::create_symlink("../../other" / file.path().filename(), stray / file.path().filename());
  }
  expect_says(error_of([&] { Checkpoint::open(stray); }), {"link out of the model folder"});
  fs::rename(cache / "snapshots", cache / "revisions");  // no cache that is known
  const std::string refusal = error_of([&] { Checkpoint::open(cache / "revisions/0123"); });
  expect_says(refusal, {"1.safetensors", "link out of the model folder"});
}

TEST(Checkpoint, FolderFifoAndDevice) {
  const TempFolder folder;
  fs::create_directory(folder / "model.safetensors");
  expect_says(refusal_of(folder), {"found a folder, expected a regular file"});
  fs::remove(folder / "model.safetensors");
  ASSERT_EQ(::mkfifo((folder / "model.safetensors").c_str(), 0600), 0);
  expect_says(refusal_of(folder), {"found a FIFO, expected a regular file"});
  fs::remove(folder / "model.safetensors");
  fs::create_symlink("/dev/zero", folder / "model.safetensors");
  expect_says(refusal_of(folder), {"found a device, expected a regular file"});
  ASSERT_EQ(::mkfifo((folder / "model.safetensors.index.json").c_str(), 0600), 0);
  expect_says(refusal_of(folder), {"index.json", "found a FIFO"});
}

TEST(Checkpoint, FileThatVanishesIsStillThere) {
  const TempFolder folder;
  fs::copy_file(fixture("mdi") / "model.safetensors", folder / "model.safetensors");
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  fs::remove(folder / "model.safetensors");
  std::vector<std::byte> bytes(checkpoint.tensors().back().bytes());
  EXPECT_NO_THROW(checkpoint.read(checkpoint.tensors().back(), 0, bytes));
}

TEST(Checkpoint, FilesAreClosedOnExec) {
  const TempFolder folder;
  write_file(folder / "f", "x");
  const File file = File::open(folder / "f");
  const int next = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // the descriptor after the file's
  ASSERT_GT(next, 0);
  EXPECT_NE(::fcntl(next - 1, F_GETFD) & FD_CLOEXEC, 0);
  ::close(next);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a fault may cost: a second of the processor and 256 MiB. Measured in a process of its own. Instrumented builds
// refuse the same faults in smaller files, and measure nothing.

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define MMREC_TEST_INSTRUMENTED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MMREC_TEST_INSTRUMENTED
#endif
#ifdef MMREC_TEST_INSTRUMENTED
constexpr bool kIsInstrumented = true;
#else
constexpr bool kIsInstrumented = false;
#endif
constexpr std::uint64_t kHugeHeader = kIsInstrumented ? 1'000'000 : 100'000'000;

long peak_kib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

void expect_cheap_refusal(const fs::path& folder) {
  if (kIsInstrumented) {
    EXPECT_THROW(Checkpoint::open(folder), std::runtime_error);
    return;
  }
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::clock_t start = std::clock();
    const long before = peak_kib();
    const bool refused = test::file_refusal([&] { Checkpoint::open(folder); }) != "no error";
    const bool was_fast = std::clock() - start < CLOCKS_PER_SEC;
    const bool was_small = peak_kib() - before < 262'144;
    ::_exit((refused ? 0 : 1) | (was_fast ? 0 : 2) | (was_small ? 0 : 4));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  const int faults = WEXITSTATUS(status);
  EXPECT_EQ(faults & 1, 0) << "was accepted";
  EXPECT_EQ(faults & 2, 0) << "took more than a second";
  EXPECT_EQ(faults & 4, 0) << "took more than 256 MiB";
}

void expect_cheap_refusal_of(std::string_view header) {
  const TempFolder folder;
  write_file(folder / "model.safetensors", safetensors_bytes(header));
  expect_cheap_refusal(folder.path());
}

/// A file whose header has `length` bytes: `start`, then zeros that take no place on the disk.
void expect_cheap_refusal_of_header(std::string_view start, std::uint64_t length) {
  const TempFolder folder;
  write_file(folder / "model.safetensors", length_bytes(length) + std::string(start));
  fs::resize_file(folder / "model.safetensors", 8 + length);
  expect_cheap_refusal(folder.path());
}

TEST(CheckpointCost, SparseHeaderOf100Megabytes) { expect_cheap_refusal_of_header("{", kHugeHeader); }

TEST(CheckpointCost, HeaderBeyondTheLimit) {
  const TempFolder folder;
  write_file(folder / "model.safetensors", length_bytes(100'000'001) + "{}");
  fs::resize_file(folder / "model.safetensors", 200'000'000);
  expect_says(refusal_of(folder), {"header", "100000001", "expected at most 100000000"});
  expect_cheap_refusal_of_header("{", std::uint64_t{1} << 40);
}

TEST(CheckpointCost, HeaderOf100MegabytesOfOneThing) {
  const std::pair<const char*, const char*> headers[] = {
      {R"({")", "x"},                              // a name
      {R"({")", R"(\u0041)"},                      // a name of escapes
      {R"({"__metadata__":{"x":")", "x"},          // a text
      {R"({"__metadata__":{"x":")", R"(\u0041)"},  // a text of escapes
      {R"({"t":)", "["},
      {R"({"t":{"shape":[)", "1,"},
      {"{", " "}};
  for (const auto& [start, piece] : headers) {
    std::string header = start;
    header.reserve(kHugeHeader);
    while (header.size() + 8 < kHugeHeader) header += piece;
    expect_cheap_refusal_of(header);
  }
}

TEST(CheckpointCost, HeaderOfTooManyTensors) {
  constexpr std::size_t kEach = 67;  // bytes at most
  expect_cheap_refusal_of(empty_tensors("blocks.", std::max<std::size_t>(kMaxTensors + 1, kHugeHeader / kEach)));
}

TEST(CheckpointCost, HeaderOfTheMostTensorsParsesFast) {
  std::string header = empty_tensors("blocks.", kMaxTensors);
  const std::clock_t start = std::clock();
  EXPECT_EQ(parse_safetensors_header(header, 0, "m").size(), kMaxTensors);
  EXPECT_LT(std::clock() - start, (kIsInstrumented ? 60 : 1) * CLOCKS_PER_SEC);
  header.back() = ',';
  header += tensor("more", 0, 0) + "}";
  expect_says(error_of([&] { parse_safetensors_header(header, 0, "m"); }), {"more than 100000 tensors"});
}

TEST(CheckpointCost, IndexThatNamesTheMostTensorsIsComparedFast) {
  const TempFolder folder;
  std::string map;
  for (std::size_t i = 0; i < kMaxTensors / 2; ++i) {
    map += "\"t" + std::to_string(i) + "\":\"1.safetensors\",\"u" + std::to_string(i) + "\":\"1.safetensors\",";
  }
  map.back() = '}';
  write_file(folder / "1.safetensors", safetensors_bytes(empty_tensors("t", kMaxTensors / 2)));
  write_file(folder / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}");
  expect_cheap_refusal(folder.path());
}

TEST(Checkpoint, TwoShardsOfTooManyTensorsTogether) {
  const TempFolder folder;
  for (const std::string shard : {"1", "2"}) {
    write_file(folder / (shard + ".safetensors"), safetensors_bytes(empty_tensors(shard + ".", kMaxTensors / 2 + 1)));
  }
  write_file(folder / "model.safetensors.index.json",
             R"({"weight_map":{"1.0":"1.safetensors","2.0":"2.safetensors"}})");
  expect_says(refusal_of(folder), {"2.safetensors", "checkpoint of more than 100000 tensors"});
}

TEST(Checkpoint, AFolderThatCannotBeLookedIntoIsASystemError) {
  const fs::path folder = fs::path("/tmp") / std::string(300, 'x');
  expect_says(error_of<std::system_error>([&] { Checkpoint::open(folder); }), {"cannot read the folder"});
}

TEST(Checkpoint, AFolderOfManyOtherFilesIsLookedThroughInPart) {
  const TempFolder folder;
  for (int i = 0; i < 1001; ++i) write_file(folder / (std::to_string(i) + ".txt"), "");
  expect_says(refusal_of(folder), {"no model.safetensors and no model.safetensors.index.json"});
  for (const char* name : {"a.pt", "b.pth", "c.bin"}) {
    const TempFolder checkpoint;
    write_file(checkpoint / name, "");
    expect_says(refusal_of(checkpoint), {"convert \"", name, "weights/convert.py"});
  }
}

#if !defined(__SANITIZE_ADDRESS__)  // UndefinedBehaviorSanitizer opens a pipe where exceptions are asked for their type
TEST(Checkpoint, AFolderThatCannotBeListedIsRefusedWithoutAHint) {
  const TempFolder folder;
  write_file(folder / "pytorch_model.bin", "PK");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string refusal = refusal_of(folder);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  expect_says(refusal, {"no model.safetensors and no model.safetensors.index.json"});
  EXPECT_EQ(refusal.find("convert"), std::string::npos) << refusal;
}
#endif

}  // namespace
}  // namespace mmrec::models
