// One beginning, many continuations: branch FOLDER PROMPT ENDING...
//
// The prompt is read once. Its state has a fixed size however long it was, so a branch costs a copy of that and not
// another reading. The last line says that a branch is what reading prompt and ending in one go would have given.
#include <mmrec/generate.h>
#include <mmrec/model.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: branch FOLDER PROMPT ENDING...\n";
    return 2;
  }
  const auto model = mmrec::Model::load(argv[1]);
  const auto tokenizer = mmrec::Tokenizer::load(argv[1]);
  const auto prompt = tokenizer.encode(argv[2]);
  auto trunk = model.new_session();
  trunk.prefill(prompt);

  const mmrec::GenerateOptions options{.sampler = {.seed = 7}, .max_tokens = 16};
  bool is_same = true;
  for (int i = 3; i < argc; ++i) {
    const auto ending = tokenizer.encode(argv[i], /*add_bos=*/false);
    auto branch = trunk.clone();
    branch.prefill(ending);
    const auto result = mmrec::generate(branch, tokenizer, options);
    std::cout << argv[2] << ' ' << argv[i] << result.text << '\n';

    auto whole = model.new_session();
    auto tokens = prompt;
    tokens.insert(tokens.end(), ending.begin(), ending.end());
    whole.prefill(tokens);
    is_same = is_same && mmrec::generate(whole, tokenizer, options).tokens == result.tokens;
  }
  std::cout << "state: " << trunk.save().size() << " bytes, position " << trunk.position() << '\n';
  std::cout << (is_same ? "branches equal whole readings" : "branches differ from whole readings") << '\n';
  return is_same ? 0 : 1;
}
