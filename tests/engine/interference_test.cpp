// What others do meanwhile: a process that saves is killed, several save to one path, a model's files change, shrink
// and vanish while they are read. MMREC_FAULTS=all: a thousand kills instead of some hundred.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <stop_token>

#include "mmrec/model.h"
#include "mmrec/state_file.h"
#include "tests/engine/sessions.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {
namespace {

const std::filesystem::path kTiny = folder_of("tiny");

bool tries_all() {
  const char* wish = std::getenv("MMREC_FAULTS");
  return wish != nullptr && std::string_view(wish) == "all";
}

std::vector<float> logits_after(const Model& model, std::size_t count) {
  Session session = begun(model, random_tokens(model, count, 1));
  return copy(session.logits());
}

class SavedTwice : public testing::Test {
 protected:
  SavedTwice() {
    const Model model = on_cpu(kTiny);
    for (const int count : {3, 60}) {  // of different lengths
      Session session = begun(model, std::vector<int>(static_cast<std::size_t>(count), 7));
      saved_.push_back(save_sequence(session, {}));
      bytes_.push_back(encode_sequence(saved_.back()));
    }
  }
  bool is_one_of_them(const SavedSequence& found) const {
    const std::vector<std::byte> bytes = encode_sequence(found);
    return bytes == bytes_[0] || bytes == bytes_[1];
  }
  void write_in_turn(int times) const {
    for (int i = 0; i != times; ++i) write_state_file(folder_ / "state", saved_[static_cast<std::size_t>(i % 2)]);
  }
  /// A child that saves one and the other in turn, `times` of them or until it is killed.
  pid_t writer(int times) const {
    const pid_t child = ::fork();
    if (child != 0) return child;
    int code = 0;
    try {
      write_in_turn(times);
    } catch (const std::exception&) {
      code = 1;
    }
    ::_exit(code);
  }

  TempFolder folder_;
  std::vector<SavedSequence> saved_;
  std::vector<std::vector<std::byte>> bytes_;
};

TEST_F(SavedTwice, AKilledWriterLeavesTheOldOrTheNew) {
  write_state_file(folder_ / "state", saved_[0]);
  std::mt19937 random(11);
  const int kills = tries_all() ? 1000 : 300;
  for (int i = 0; i < kills; ++i) {
    const pid_t child = writer(-1);
    ASSERT_GT(child, 0);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    ASSERT_TRUE(is_one_of_them(read_state_file(folder_ / "state"))) << "kill " << i;
  }
  // A file may be left that had its name and not yet its place: at most one of each child's.
  const auto left = std::distance(std::filesystem::directory_iterator(folder_.path()), {}) - 1;
  std::cout << "  " << kills << " kills left " << left << " files beside the state\n";
  EXPECT_LE(left, kills / 4);
}

TEST_F(SavedTwice, ProcessesAndThreadsAtOnePathWriteWholeFiles) {
  write_state_file(folder_ / "state", saved_[0]);
  const pid_t writers[] = {writer(200), writer(200)};
  std::array<std::jthread, 2> threads;
  for (std::jthread& thread : threads) thread = std::jthread([&] { write_in_turn(40); });
  for (int running = 2; running > 0;) {
    EXPECT_TRUE(is_one_of_them(read_state_file(folder_ / "state")));
    int status = 0;
    if (const pid_t ended = ::waitpid(-1, &status, WNOHANG); ended == writers[0] || ended == writers[1]) {
      --running;
      EXPECT_EQ(status, 0);
    }
  }
  for (std::jthread& thread : threads) thread.join();
  EXPECT_TRUE(is_one_of_them(read_state_file(folder_ / "state")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1);
}

// Each load gives the model that a folder held at some time, or says what is wrong; no signal, no other numbers.
TEST(Interference, AFolderThatChangesWhileItIsLoaded) {
  namespace fs = std::filesystem;
  const TempFolder folder;
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.model"}) {
    fs::copy_file(kTiny / name, folder / name);
  }
  const std::vector<float> expected = logits_after(on_cpu(kTiny), 9);
  std::jthread changes([&](const std::stop_token& stop) {
    std::mt19937 random(3);
    const auto wait = [&](unsigned most) { std::this_thread::sleep_for(std::chrono::microseconds(random() % most)); };
    std::error_code ignored;
    while (!stop.stop_requested()) {
      const char* name = random() % 4 == 0 ? "config.json" : "model.safetensors";
      const std::string whole = read_file(kTiny / name);
      const fs::path path = folder / name;
      if (random() % 2 == 0) {
        fs::resize_file(path, random() % whole.size(), ignored);  // shrinks in place
      } else {
        fs::remove(path, ignored);
      }
      wait(300);
      if (random() % 2 == 0) {
        write_file(path, whole);  // comes back from the beginning on
      } else {
        write_file(folder / "new", whole);
        fs::rename(folder / "new", path, ignored);
      }
      wait(5000);  // a load takes about 1 ms
    }
  });
  const int wanted = tries_all() ? 2000 : 100;  // models found; a refusal takes much less time than a load
  int loaded = 0;
  int refused = 0;
  while (loaded < wanted && refused < 1000 * wanted) {
    try {
      const Model model = on_cpu(folder.path());
      ++loaded;
      ASSERT_EQ(logits_after(model, 9), expected);
    } catch (const std::runtime_error& error) {  // system errors too
      ++refused;
      const std::string_view what = error.what();
      ASSERT_NE(what.find(folder.path().native()), std::string_view::npos) << what;
      ASSERT_EQ(what.find('\n'), std::string_view::npos) << what;
    }
  }
  changes.request_stop();
  changes.join();
  std::cout << "  " << loaded << " loads found a model, " << refused << " were refused\n";
  EXPECT_EQ(loaded, wanted);
  EXPECT_GT(refused, 0);
}

// Weights that are renamed over others while a folder is loaded: a load has all of one or all of the other.
TEST(Interference, ReplacedWeightsAreOneOrTheOther) {
  namespace fs = std::filesystem;
  const TempFolder folder;
  fs::copy_file(kTiny / "config.json", folder / "config.json");
  const fs::path path = folder / "model.safetensors";
  EditableCheckpoint checkpoint(kTiny / "model.safetensors");
  std::vector<std::vector<float>> expected;
  std::vector<std::string> contents;
  for (const float factor : {1.0F, -0.5F}) {  // of every tensor, so that any mixture would give other numbers
    for (EditableTensor& tensor : checkpoint.tensors) {
      for (std::size_t i = 0; i < tensor.bytes.size() / sizeof(float); ++i) tensor.set(i, tensor.at(i) * factor);
    }
    checkpoint.write(path);
    contents.push_back(read_file(path));
    expected.push_back(logits_after(on_cpu(folder.path()), 9));
  }
  ASSERT_NE(expected[0], expected[1]);
  std::jthread changes([&](const std::stop_token& stop) {
    for (std::size_t i = 0; !stop.stop_requested(); ++i) {
      write_file(folder / "new", contents[i % 2]);
      fs::rename(folder / "new", path);
    }
  });
  int seen[2] = {0, 0};
  for (int i = 0, loads = tries_all() ? 10000 : 500; i < loads; ++i) {
    std::vector<float> got;
    EXPECT_NO_THROW(got = logits_after(on_cpu(folder.path()), 9)) << "load " << i;
    const bool is_second = got == expected[1];
    if (!is_second && got != expected[0]) ADD_FAILURE() << "load " << i << " has other numbers";
    ++seen[is_second ? 1 : 0];
  }
  changes.request_stop();
  changes.join();
  std::cout << "  " << seen[0] << " loads of one, " << seen[1] << " of the other\n";
  EXPECT_GT(seen[0], 0);
  EXPECT_GT(seen[1], 0);
}

}  // namespace
}  // namespace mmrec::test
