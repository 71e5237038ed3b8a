// A tokenizer.model of any bytes is refused, or loads and then encodes and decodes whatever it is given.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const mmrec::Tokenizer tokenizer = mmrec::Tokenizer::from_bytes(bytes);
    std::string every_byte;
    for (int i = 0; i < 256; ++i) every_byte += static_cast<char>(i);
    std::string pieces;  // what its own tries match
    for (int id = 0; id < tokenizer.vocab_size() && pieces.size() < 512; ++id) pieces += tokenizer.piece(id);
    for (const std::string_view text : {std::string_view(" the  cat\n\nsat "), std::string_view(every_byte),
                                        std::string_view(pieces), bytes.substr(0, 512)}) {
      const std::vector<int> ids = tokenizer.encode(text);
      for (const int id : ids) {
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
      }
      (void)tokenizer.decode(ids);
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
