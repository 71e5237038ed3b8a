// Perplexity of documents that stand on stdin, a line each, in memory that does not grow with them: score_documents
// FOLDER
//
// Prints number, tokens and negative log-likelihood of each, then the measures of all. A recurrent model needs no
// window: every token is scored once, given all before it in its document.
#include <mmrec/scorer.h>
#include <mmrec/tokenizer.h>

#include <cstdio>
#include <deque>
#include <iostream>
#include <string>

namespace {

struct Size {
  std::int64_t bytes;
  std::int64_t words;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: score_documents FOLDER < LINES\n";
    return 2;
  }
  const auto tokenizer = mmrec::Tokenizer::load(argv[1]);
  mmrec::Scorer scorer(mmrec::Model::load(argv[1]));

  // The scorer reads ahead of what it hands over, in order, so the sizes of the documents between wait in a queue.
  std::deque<Size> sizes;
  const auto next = [&](std::vector<int>& ids) {
    std::string line;
    if (!std::getline(std::cin, line)) return false;
    sizes.push_back({static_cast<std::int64_t>(line.size()), mmrec::count_words(line)});
    ids = tokenizer.encode(line);
    return true;
  };
  mmrec::PerplexityAccumulator corpus;
  const auto on_score = [&](std::size_t document, std::vector<int>&, mmrec::DocumentScore& score) {
    std::printf("%zu\t%zu\t%.6f\n", document + 1, score.logprobs.size(), score.nll);
    corpus.add(score, sizes.front().bytes, sizes.front().words);
    sizes.pop_front();
    return true;
  };
  scorer.score_stream(next, on_score);

  const auto all = corpus.summary();
  std::printf("tokens %lld, ppl %.6f, bits per byte %.6f, word ppl %.6f\n", static_cast<long long>(all.tokens), all.ppl,
              all.bits_per_byte, all.word_ppl);
}
