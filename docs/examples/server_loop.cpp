// The loop of a server: many threads ask, one thread computes for all of them together: server_loop FOLDER PROMPT...
//
// A Model is shared by all threads. A Generator belongs to one: here a thread of its own, which takes requests from a
// queue between rounds, so that they join the batch that is running and leave it as they end.
#include <mmrec/generator.h>

#include <condition_variable>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

class Server {
 public:
  Server(const mmrec::Model& model, mmrec::Tokenizer tokenizer)
      : generator_(model, std::move(tokenizer), {.slots = 8}) {
    thread_ = std::thread([this] { serve(); });
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  /// Answers everybody who has asked.
  ~Server() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  /// From any thread. The future throws what is wrong with the request.
  std::future<mmrec::GenerateResult> ask(mmrec::GeneratorRequest request) {
    auto answer = std::make_shared<std::promise<mmrec::GenerateResult>>();
    auto future = answer->get_future();
    request.on_finish = [answer](mmrec::GenerateResult result) { answer->set_value(std::move(result)); };
    {
      const std::lock_guard lock(mutex_);
      asked_.push_back({std::move(request), std::move(answer)});
    }
    changed_.notify_one();
    return future;
  }

 private:
  struct Asked {
    mmrec::GeneratorRequest request;
    std::shared_ptr<std::promise<mmrec::GenerateResult>> answer;
  };

  void serve() {
    for (bool is_busy = false;;) {
      std::vector<Asked> asked;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return is_busy || closing_ || !asked_.empty(); });
        if (!is_busy && asked_.empty()) return;
        asked.swap(asked_);
      }
      for (Asked& one : asked) {
        try {
          generator_.submit(std::move(one.request));
        } catch (const std::exception&) {  // of this request alone
          one.answer->set_exception(std::current_exception());
        }
      }
      try {
        is_busy = generator_.run_once();
      } catch (const std::exception& error) {  // those it concerns have been answered with FinishReason::kError
        std::cerr << error.what() << '\n';
        is_busy = true;
      }
    }
  }

  mmrec::Generator generator_;  // the thread's alone
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Asked> asked_;  // guarded by mutex_, as the next
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: server_loop FOLDER PROMPT...\n";
    return 2;
  }
  const auto model = mmrec::Model::load(argv[1]);
  const auto tokenizer = mmrec::Tokenizer::load(argv[1]);
  const std::vector<std::string> prompts(argv + 2, argv + argc);
  std::vector<std::string> texts(prompts.size());
  {
    Server server(model, tokenizer);
    std::vector<std::thread> clients;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      clients.emplace_back([&, i] {
        const auto prompt = tokenizer.encode(prompts[i]);  // a Tokenizer may be used by many threads
        auto answer = server.ask({.prompt = prompt, .options = {.sampler = {.seed = i}, .max_tokens = 24}});
        const auto result = answer.get();
        texts[i] = result.finish_reason == mmrec::FinishReason::kError ? result.error : result.text;
      });
    }
    for (std::thread& client : clients) client.join();

    auto refused = server.ask({.prompt = {-1}});  // no such token: this request fails, the server goes on
    try {
      refused.get();
    } catch (const std::invalid_argument& error) {
      std::cerr << "refused: " << error.what() << '\n';
    }
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) std::cout << prompts[i] << texts[i] << '\n';
}
