// Text from a prompt, as it is drawn: generate FOLDER PROMPT
#include <mmrec/generate.h>
#include <mmrec/model.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: generate FOLDER PROMPT\n";
    return 2;
  }
  const auto model = mmrec::Model::load(argv[1]);
  const auto tokenizer = mmrec::Tokenizer::load(argv[1]);
  auto session = model.new_session();
  session.prefill(tokenizer.encode(argv[2]));

  mmrec::GenerateOptions options{.sampler = {.temperature = 0.7F, .seed = 1}, .max_tokens = 32};
  options.on_text = [](std::string_view text) { return bool(std::cout << text << std::flush); };  // false ends it
  const auto result = mmrec::generate(session, tokenizer, options);
  std::cout << '\n';
  std::cerr << result.tokens.size() << " tokens, ended by " << mmrec::to_string(result.finish_reason) << '\n';
}
