// A text's ids as StreamEncoder gives them, and the text of ids as StreamDecoder does.
#pragma once

#include "mmrec/tokenizer.h"
#include "models/files/utf8.h"
#include "tests/support/prelude.h"

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

inline std::string decoded_in_parts(const Tokenizer& tokenizer, std::span<const int> ids) {
  StreamDecoder decoder(tokenizer);
  std::string text;
  for (const int id : ids) {
    const std::string part = decoder.push(id);
    EXPECT_TRUE(models::is_valid_utf8(part)) << "complete characters only";
    text += part;
  }
  return text + decoder.finish();
}

}  // namespace mmrec::test
