// A text's ids as StreamEncoder gives them.
#pragma once

#include <string_view>
#include <vector>

#include "mmrec/tokenizer.h"

namespace mmrec::test {

inline std::vector<int> encoded_in_parts(const Tokenizer& tokenizer, std::string_view text, bool add_bos = true,
                                         int threads = 1) {
  StreamEncoder encoder(tokenizer, text, add_bos, threads);
  std::vector<int> ids;
  for (bool goes_on = true; goes_on;) {
    std::vector<int> part;
    goes_on = encoder.next(part);
    ids.insert(ids.end(), part.begin(), part.end());
  }
  return ids;
}

}  // namespace mmrec::test
