// A tokenizer.tiktoken and its tokenizer_config.json of any bytes are refused, or load and then encode any text to ids
// that decode to it. The input is the config, a zero byte and the rank file; "*" first in the latter stands for the 256
// single bytes, so that mutations find what comes after them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/tokenizer.h"
#include "models/files/utf8.h"
#include "tests/support/rank_file_builder.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::size_t cut = std::min(bytes.find('\0'), size);
  const std::string config(bytes.substr(0, cut));
  std::string ranks(bytes.substr(std::min(cut + 1, size)));
  if (ranks.starts_with('*')) ranks.replace(0, 1, mmrec::test::rank_file(mmrec::test::bytes_and({})));
  try {
    const mmrec::Tokenizer tokenizer = mmrec::Tokenizer::from_bytes(ranks, config, "tokenizer.tiktoken");
    std::string every_byte;
    for (int i = 0; i < 256; ++i) every_byte += static_cast<char>(i);
    for (const std::string_view text : {std::string_view(" the  cat's\r\n\n12345 sat "), std::string_view(every_byte),
                                        std::string_view("aaaaaaaaaaaaaaaaaaaaaaaaaaaa"), bytes.substr(0, 512)}) {
      const std::vector<int> ids = tokenizer.encode(text, false);
      for (const int id : ids) {
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
      }
      if (tokenizer.decode(ids) != mmrec::models::replace_invalid_utf8(text)) std::abort();
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
